-- What is asked of a worker, written before the call leaves; or what was noticed of it.
-- `seq` counts rows. `change` counts what happened to the ledger: an intent and its outcome are two
-- changes.
CREATE TABLE witness_intents (
  seq            BIGINT PRIMARY KEY CHECK (seq > 0),
  change         BIGINT NOT NULL UNIQUE CHECK (change > 0),
  at             TEXT NOT NULL,
  worker         TEXT NOT NULL,
  rank           BIGINT,
  incarnation    TEXT,
  session        TEXT,
  action         TEXT NOT NULL,
  level          BIGINT,
  weight_version TEXT,
  warm_demoted   BOOLEAN NOT NULL,
  asked          TEXT NOT NULL
);
CREATE INDEX witness_intents_worker ON witness_intents (worker, seq);
CREATE INDEX witness_intents_session ON witness_intents (session, seq) WHERE session IS NOT NULL;

-- What came of it, at most once. What was noticed has the same `change` in both tables.
CREATE TABLE witness_outcomes (
  seq            BIGINT PRIMARY KEY REFERENCES witness_intents (seq),
  change         BIGINT NOT NULL UNIQUE CHECK (change > 0),
  recorded_at    TEXT NOT NULL,
  phase          TEXT NOT NULL,
  kv             TEXT NOT NULL,
  tiers          TEXT NOT NULL,
  weight_version TEXT,
  warm_demoted   BOOLEAN NOT NULL,
  serving        BOOLEAN NOT NULL,
  evidence       TEXT NOT NULL,
  answered       TEXT NOT NULL,
  observed       TEXT NOT NULL,
  reason         TEXT NOT NULL
);

-- The ledger as everybody reads it. Without an outcome nobody knows what became of the worker.
CREATE VIEW witness AS
SELECT i.seq, i.at, i.worker, i.rank, i.incarnation, i.session, i.action, i.level,
  COALESCE(o.phase, 'error') AS phase,
  COALESCE(o.kv, 'unknown') AS kv,
  COALESCE(o.tiers, '{"gpu":"unknown"}') AS tiers,
  CASE WHEN o.seq IS NULL THEN i.weight_version ELSE o.weight_version END AS weight_version,
  COALESCE(o.warm_demoted, i.warm_demoted) AS warm_demoted,
  COALESCE(o.serving, FALSE) AS serving,
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

CREATE FUNCTION witness_refuse() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'the ledger is append-only'; END $$;
CREATE TRIGGER witness_intents_append_only
BEFORE UPDATE OR DELETE OR TRUNCATE ON witness_intents
FOR EACH STATEMENT EXECUTE FUNCTION witness_refuse();
CREATE TRIGGER witness_outcomes_append_only
BEFORE UPDATE OR DELETE OR TRUNCATE ON witness_outcomes
FOR EACH STATEMENT EXECUTE FUNCTION witness_refuse();

CREATE TABLE sessions (
  id             TEXT PRIMARY KEY NOT NULL,
  worker         TEXT,
  run            TEXT NOT NULL,
  reason         TEXT,
  salt           TEXT,
  created_at     BIGINT NOT NULL,
  last_seen_at   BIGINT NOT NULL,
  claimed_tokens BIGINT NOT NULL CHECK (claimed_tokens >= 0),
  cached_tokens  BIGINT NOT NULL CHECK (cached_tokens >= 0),
  last_witness   BIGINT CHECK (last_witness > 0)
);
CREATE INDEX sessions_last_seen ON sessions (last_seen_at, id);
