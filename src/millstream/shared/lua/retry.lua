#!lua
-- Submit the task of a dead letter again, as a new task; the letter goes in the same step.
-- KEYS: dead letters, queue, new task
-- ARGV: entry of the letter, id of the new task, model, max_queue, live_ttl_s, life_ms
-- -> 'queued' | 'unknown' there is no such letter | 'full' as many wait as may
if redis.call('EXISTS', KEYS[3]) == 1 then return 'queued' end -- sent again after a lost answer
local letter = redis.call('XRANGE', KEYS[1], ARGV[1], ARGV[1])[1]
if not letter then return 'unknown' end
pending(KEYS[2]) -- makes the group where it is missing
if redis.call('ZCARD', line_key(ARGV[3])) >= tonumber(ARGV[4]) then return 'full' end
local fields = {}
for at = 1, #letter[2], 2 do fields[letter[2][at]] = letter[2][at + 1] end
fields.model = ARGV[3]
-- Whoever waited for the answer has gone long since: it belongs to no connection.
enqueue(ARGV[2], fields, fields.request, ARGV[5], '0', ARGV[6])
redis.call('XDEL', KEYS[1], ARGV[1])
return 'queued'
