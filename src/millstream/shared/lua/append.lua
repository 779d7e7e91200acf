#!lua
-- Write one decode step of many tasks of a model: their new events, and the end of those that end.
-- KEYS: queue
-- ARGV: worker, result_ttl_s, msgpack rows
--   row: {id, attempt, prompt_tokens, first_seq, outcome, detail, ids, data, ids, data, …}
--   outcome '' goes on; 'completed' (detail: finish reason) or 'failed' (detail: error JSON) ends
-- -> per row the number of the last event in the log, or
--    -1 it is not this attempt's to write, -2 it has ended, -3 there is no such task
-- An event the log has already is skipped if it is the same; one that would leave a gap is not
-- written, and the answer tells the worker from where to send again.
local me, result_ttl_s = ARGV[1], tonumber(ARGV[2])

-- Whether a task whose answer belongs to a connection has lost it: its pod died, nobody came back.
local function orphaned(id, orphan_ms)
  local now = now_ms()
  local since = tonumber(redis.call('HGET', task_key(id), 'unheard_since') or '')
  if not since then redis.call('HSET', task_key(id), 'unheard_since', int(now)) end
  return since and now - since >= orphan_ms
end

local answers = {}
for at, row in ipairs(cmsgpack.unpack(ARGV[3])) do
  local id, attempt, first = row[1], int(row[2]), row[4]
  clear_broken(id)
  local state, owner, seq, tokens, followers, orphan_ms, worker, prompt_tokens, paid =
    unpack(redis.call('HMGET', task_key(id), 'state', 'attempt', 'seq', 'tokens', 'followers',
      'orphan_ms', 'worker', 'prompt_tokens', 'paid'))
  local unfinished = state == 'queued' or state == 'running'
  if not state then
    answers[at] = -3
  elseif unfinished and row[2] > tonumber(owner) then
    take_back(id, attempt, me)
    answers[at] = 0 -- all of it again: what is there is compared
  elseif owner ~= attempt or (unfinished and (worker or '') ~= '' and worker ~= me) then
    answers[at] = -1
  elseif state ~= 'running' then
    answers[at] = -2
  else
    seq, tokens = tonumber(seq), tonumber(tokens)
    local log = log_key(id)
    local message = {id, seq + 1}
    local last = first - 1
    for part = 7, #row, 2 do
      last = last + 1
      local ids, data = row[part], row[part + 1]
      if last <= seq and not holds(id, last, 't', ids, data) then
        answers[at] = -1
        row[5] = ''
        break
      elseif last == seq + 1 then
        redis.call('XADD', log, int(last) .. '-0', 'k', 't', 'a', attempt, 'i', ids, 'd', data)
        seq = last
        if ids ~= '' then
          tokens = tokens + 1 + select(2, string.gsub(ids, ',', ''))
        end
        local size = #message
        message[size + 1], message[size + 2], message[size + 3] = 't', ids, data
      end
    end
    if not prompt_tokens then redis.call('HSET', task_key(id), 'prompt_tokens', int(row[3])) end
    if #message > 2 then
      redis.call('HSET', task_key(id), 'seq', int(seq), 'tokens', int(tokens))
      local due = cost_of(row[3], tokens) - tonumber(paid or 0)
      if due > 0 then pay_ahead(id, read_task(id), due) end
      if message[2] == 1 then redis.call('EXPIRE', log, redis.call('TTL', task_key(id))) end
      post(followers, message)
      if (followers or '') == '' and orphan_ms ~= '0' and orphaned(id, tonumber(orphan_ms)) then
        finish(id, read_task(id), 'cancelled', '', result_ttl_s)
        answers[at] = -2
        row[5] = ''
      end
    end
    if row[5] ~= '' and last == seq then
      finish(id, read_task(id), row[5], row[6], result_ttl_s)
      seq = seq + 1
    end
    answers[at] = answers[at] or seq
  end
end
send_posts()
return answers
