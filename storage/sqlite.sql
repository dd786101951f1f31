-- The SQLite store: one table for each key space, and the few statements that are run on them.
--
-- A space is an ordered map of keys to values (storage/kv.py), so a table is the same: no column
-- is looked into by SQL, and what the values hold is drawn above their encoders.
--
-- {space} stands for the name of a space.

-- name: pragma_page
-- Before anything else in a new file. A commit writes whole pages: of one entry and one consumer
-- 21 KiB with pages of 4 KiB, 37 with 8, 70 with 16; of a hundred entries 58, 74 and 130; and the
-- time does not differ.
PRAGMA page_size = 4096;

-- name: pragma_vacuum
-- Before the first table: pages that a Prune frees can be given back to the disk step by step.
PRAGMA auto_vacuum = INCREMENTAL;

-- name: pragma_journal
-- Readers do not wait for the writer; a commit is one sequential write and one sync.
PRAGMA journal_mode = WAL;

-- name: pragma_synchronous
-- FULL: the write-ahead log is synced in every commit. NORMAL: only when it is checkpointed.
PRAGMA synchronous = {synchronous};

-- name: pragma_checkpoint
-- Checkpoints are made by hand, outside of commits.
PRAGMA wal_autocheckpoint = 0;

-- name: pragma_journal_limit
-- After a burst the write-ahead log is cut back to 64 MiB when it starts anew.
PRAGMA journal_size_limit = 67108864;

-- name: pragma_cache
-- 256 KiB of pages beyond those of a transaction: a page that the operating system has costs 2 us,
-- a commit a hundred times that; and what is kept of them looks as if sleeping sessions cost memory.
PRAGMA cache_size = -256;

-- name: spill
-- More than the cache holds: given up, it leaves its pages in the write-ahead log behind the last
-- commit, where the next commits write over them.
INSERT INTO held (k, v) VALUES (x'00', zeroblob({bytes}));

-- name: pragma_erase
-- Of a sealed database: what is deleted is overwritten with zeros, in pages and in free ones.
PRAGMA secure_delete = ON;

-- name: pragma_query_only
-- A connection that reads cannot write, whatever it is asked.
PRAGMA query_only = ON;

-- name: create
-- An older database has the tables of its format only. Small rows: the key is the table's own order, so a row is found in one descent.
CREATE TABLE IF NOT EXISTS {space} (k BLOB PRIMARY KEY, v BLOB NOT NULL) STRICT, WITHOUT ROWID;

-- name: create_large
-- Rows that may be large: leaves hold the beginning of a value and a chain of pages the rest; in
-- a table without rowids the inner pages would hold values as well.
CREATE TABLE IF NOT EXISTS {space} (k BLOB PRIMARY KEY, v BLOB NOT NULL) STRICT;

-- name: create_numbered
-- The history: its key is the first offset, and the next block always goes to the end.
CREATE TABLE IF NOT EXISTS {space} (k INTEGER PRIMARY KEY, v BLOB NOT NULL) STRICT;

-- name: begin_write
-- The lock is taken at the start: a transaction that began by reading could not wait for it.
BEGIN IMMEDIATE;

-- name: begin_read
-- One state of the database for everything that is read until the end.
BEGIN;

-- name: commit
-- With synchronous = FULL it returns after the sync.
COMMIT;

-- name: rollback
-- Also after a COMMIT that failed: the transaction is still open then.
ROLLBACK;

-- name: get
-- One row.
SELECT v FROM {space} WHERE k = ?;

-- name: put
-- Insert or replace.
INSERT INTO {space} (k, v) VALUES (?1, ?2) ON CONFLICT (k) DO UPDATE SET v = ?2;

-- name: delete
-- The number of changed rows tells whether it was there.
DELETE FROM {space} WHERE k = ?;

-- name: scan_up
-- Rows from ?1 up to, but without, ?2, in key order.
SELECT k, v FROM {space} WHERE k >= ?1 AND k < ?2 ORDER BY k;

-- name: scan_up_all
-- Rows from ?1 on, in key order.
SELECT k, v FROM {space} WHERE k >= ?1 ORDER BY k;

-- name: scan_down
-- The same as scan_up, from the last one down.
SELECT k, v FROM {space} WHERE k >= ?1 AND k < ?2 ORDER BY k DESC;

-- name: scan_down_all
-- The same as scan_up_all, from the last one down.
SELECT k, v FROM {space} WHERE k >= ?1 ORDER BY k DESC;

-- name: checkpoint
-- Copies what it can from the write-ahead log to the database, without waiting for anybody.
PRAGMA wal_checkpoint(PASSIVE);

-- name: checkpoint_all
-- Copies all of the write-ahead log, waiting for readers, and cuts it to nothing.
PRAGMA wal_checkpoint(TRUNCATE);

-- name: vacuum_all
-- Gives every free page back to the disk.
PRAGMA incremental_vacuum;

-- name: free_pages
-- Pages that a Prune freed and nothing uses yet.
PRAGMA freelist_count;

-- name: pages
-- All pages of the file.
PRAGMA page_count;

-- name: vacuum
-- Gives up to {pages} free pages at the end of the file back to the disk.
PRAGMA incremental_vacuum({pages});
