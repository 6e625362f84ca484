-- What of the worker its engine does not show, after the row: as JSON. Of an intent: what would hold
-- if no outcome followed. Null where the row says nothing of it: refused past the worker's owner, or
-- written by a fak that did not tell.
ALTER TABLE witness_intents ADD COLUMN standing TEXT;
ALTER TABLE witness_outcomes ADD COLUMN standing TEXT;

DROP VIEW witness;
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
  COALESCE(o.change, i.change) AS change,
  CASE WHEN o.seq IS NULL THEN i.standing ELSE o.standing END AS standing
FROM witness_intents i LEFT JOIN witness_outcomes o ON o.seq = i.seq;
