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
-- This is what a store does most, for each token: nothing is asked that few tokens need, and a row is
-- made with all it will hold, for a table that grows is made anew (docs/performance.md, The store).
local me, result_ttl_s = ARGV[1], tonumber(ARGV[2])

-- Whether a task whose answer belongs to a connection has lost it: its pod died, nobody came back.
local function orphaned(key, orphan_ms)
  local now = now_ms()
  local since = tonumber(redis.call('HGET', key, 'unheard_since') or '')
  if not since then redis.call('HSET', key, 'unheard_since', int(now)) end
  return since and now - since >= orphan_ms
end

-- -> what the row is answered
local function write(row)
  local id, attempt, prompt, first, outcome = row[1], row[2], row[3], row[4], row[5]
  local key, log = task_key(id), log_key(id)
  local state, owner, worker, seq, tokens, followers, orphan_ms, prompt_tokens, paid = unpack(
    redis.call('HMGET', key, 'state', 'attempt', 'worker', 'seq', 'tokens', 'followers', 'orphan_ms',
      'prompt_tokens', 'paid'))
  if not state then return -3 end
  owner, seq, tokens = owner + 0, seq + 0, tokens + 0
  local unfinished = state == 'running' or state == 'queued'
  local ahead = unfinished and attempt > owner
  if (ahead or outcome ~= '') and clear_broken(id) then return -3 end
  if ahead then
    take_back(id, int(attempt), me)
    return 0 -- all of it again: what is there is compared
  end
  if attempt ~= owner or (unfinished and (worker or '') ~= '' and worker ~= me) then return -1 end
  if state ~= 'running' then return -2 end

  local message
  local last = first - 1
  for part = 7, #row, 2 do
    last = last + 1
    local ids, data = row[part], row[part + 1]
    if last <= seq and not holds(id, last, 't', ids, data) then
      return -1
    elseif last == seq + 1 then
      redis.call('XADD', log, last, 'k', 't', 'a', attempt, 'i', ids, 'd', data)
      seq = last
      if string.find(ids, ',', 1, true) then
        tokens = tokens + 1 + select(2, string.gsub(ids, ',', ''))
      elseif ids ~= '' then
        tokens = tokens + 1
      end
      if message then
        local size = #message
        message[size + 1], message[size + 2], message[size + 3] = 't', ids, data
      else
        message = {id, seq, 't', ids, data}
      end
    end
  end
  if not prompt_tokens then shows_itself(string.match(KEYS[1], ':queue:(.*)'), me) end
  if message and prompt_tokens then
    redis.call('HSET', key, 'seq', seq, 'tokens', tokens)
  elseif message then
    redis.call('HSET', key, 'seq', seq, 'tokens', tokens, 'prompt_tokens', prompt)
  elseif not prompt_tokens then
    redis.call('HSET', key, 'prompt_tokens', prompt)
  end
  if message then
    local due = cost_of(prompt, tokens) - (paid or 0)
    if due > 0 then
      local task = read_task(id)
      pay_ahead(task, due)
      redis.call('HSET', key, 'paid', task.paid)
    end
    if message[2] == 1 then redis.call('EXPIRE', log, redis.call('TTL', key)) end
    post(followers, message)
    if (followers or '') == '' and orphan_ms ~= '0' and orphaned(key, tonumber(orphan_ms)) then
      finish(id, read_task(id), 'cancelled', '', result_ttl_s)
      return -2
    end
  end
  if outcome ~= '' and last == seq then
    finish(id, fields_of(id), outcome, row[6], result_ttl_s)
    return seq + 1
  end
  return seq
end

-- Whether somebody else has written into the log, after its last event: then nobody can go on with
-- it, and the task is gone like one whose keys have another type.
local function clear_foreign(id)
  local last = redis.call('XREVRANGE', log_key(id), '+', '-', 'COUNT', 1)[1]
  local seq = redis.call('HGET', task_key(id), 'seq')
  if not last or not seq or tonumber(string.match(last[1], '^%d+')) <= tonumber(seq) then return false end
  return redis.call('DEL', task_key(id), log_key(id)) > 0
end

local answers = {}
for at, row in ipairs(cmsgpack.unpack(ARGV[3])) do
  local done, answer = pcall(write, row)
  if not done then -- looking first would be two commands more for each row
    if not clear_broken(row[1]) and not clear_foreign(row[1]) then return redis.error_reply(answer) end
    answer = -3
  end
  answers[at] = answer
end
send_posts()
return answers
