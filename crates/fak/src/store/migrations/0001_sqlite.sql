-- What is asked of a worker, written before the call leaves; or what was noticed of it.
-- `seq` counts rows. `change` counts what happened to the ledger: an intent and its outcome are two
-- changes.
CREATE TABLE witness_intents (
  seq            INTEGER PRIMARY KEY CHECK (seq > 0),
  change         INTEGER NOT NULL UNIQUE CHECK (change > 0),
  at             TEXT NOT NULL,
  worker         TEXT NOT NULL,
  rank           INTEGER,
  incarnation    TEXT,
  session        TEXT,
  action         TEXT NOT NULL,
  level          INTEGER,
  weight_version TEXT,
  warm_demoted   INTEGER NOT NULL CHECK (warm_demoted IN (0, 1)),
  asked          TEXT NOT NULL
) STRICT;
CREATE INDEX witness_intents_worker ON witness_intents (worker, seq);
CREATE INDEX witness_intents_session ON witness_intents (session, seq) WHERE session IS NOT NULL;

-- What came of it, at most once. What was noticed has the same `change` in both tables.
CREATE TABLE witness_outcomes (
  seq            INTEGER PRIMARY KEY REFERENCES witness_intents (seq),
  change         INTEGER NOT NULL UNIQUE CHECK (change > 0),
  recorded_at    TEXT NOT NULL,
  phase          TEXT NOT NULL,
  kv             TEXT NOT NULL,
  tiers          TEXT NOT NULL,
  weight_version TEXT,
  warm_demoted   INTEGER NOT NULL CHECK (warm_demoted IN (0, 1)),
  serving        INTEGER NOT NULL CHECK (serving IN (0, 1)),
  evidence       TEXT NOT NULL,
  answered       TEXT NOT NULL,
  observed       TEXT NOT NULL,
  reason         TEXT NOT NULL
) STRICT;

-- The ledger as everybody reads it. Without an outcome nobody knows what became of the worker.
CREATE VIEW witness AS
SELECT i.seq, i.at, i.worker, i.rank, i.incarnation, i.session, i.action, i.level,
  COALESCE(o.phase, 'error') AS phase,
  COALESCE(o.kv, 'unknown') AS kv,
  COALESCE(o.tiers, '{"gpu":"unknown"}') AS tiers,
  CASE WHEN o.seq IS NULL THEN i.weight_version ELSE o.weight_version END AS weight_version,
  COALESCE(o.warm_demoted, i.warm_demoted) AS warm_demoted,
  COALESCE(o.serving, 0) AS serving,
  COALESCE(o.evidence, 'none') AS evidence,
  i.asked,
  COALESCE(o.answered, 'null') AS answered,
  COALESCE(o.observed, 'null') AS observed,
  COALESCE(o.reason, 'unrecorded') AS reason,
  o.recorded_at,
  COALESCE(o.change, i.change) AS change
FROM witness_intents i LEFT JOIN witness_outcomes o ON o.seq = i.seq;

-- The numbers that the next write takes.
CREATE VIEW witness_next AS
SELECT
  (SELECT COALESCE(MAX(seq), 0) + 1 FROM witness_intents) AS seq,
  (SELECT COALESCE(MAX(change), 0) + 1 FROM (
    SELECT MAX(change) AS change FROM witness_intents
    UNION ALL SELECT MAX(change) FROM witness_outcomes
  ) AS newest) AS change;

-- REPLACE deletes without firing a trigger on DELETE, hence those on INSERT.
CREATE TRIGGER witness_intents_no_update BEFORE UPDATE ON witness_intents
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER witness_intents_no_delete BEFORE DELETE ON witness_intents
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER witness_intents_no_replace BEFORE INSERT ON witness_intents
WHEN EXISTS (SELECT 1 FROM witness_intents WHERE seq = NEW.seq OR change = NEW.change)
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER witness_outcomes_no_update BEFORE UPDATE ON witness_outcomes
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER witness_outcomes_no_delete BEFORE DELETE ON witness_outcomes
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;
CREATE TRIGGER witness_outcomes_no_replace BEFORE INSERT ON witness_outcomes
WHEN EXISTS (SELECT 1 FROM witness_outcomes WHERE seq = NEW.seq OR change = NEW.change)
BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;

CREATE TABLE sessions (
  id             TEXT PRIMARY KEY NOT NULL,
  worker         TEXT,
  run            TEXT NOT NULL,
  reason         TEXT,
  salt           TEXT,
  created_at     INTEGER NOT NULL,
  last_seen_at   INTEGER NOT NULL,
  claimed_tokens INTEGER NOT NULL CHECK (claimed_tokens >= 0),
  cached_tokens  INTEGER NOT NULL CHECK (cached_tokens >= 0),
  last_witness   INTEGER CHECK (last_witness > 0)
) STRICT;
CREATE INDEX sessions_last_seen ON sessions (last_seen_at, id);
