#!lua
-- Answer if writes are taken. It writes nothing: a script without flags is refused as a whole when
-- memory is full, the disk is, replicas are missing, or the server has become a replica.
-- KEYS: any
return 1
