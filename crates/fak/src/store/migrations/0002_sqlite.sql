-- Who holds a worker, from the beginning of a rollout's pause to its end.
-- `canary` is what the engine answered before it slept, as JSON; null where it was not asked.
CREATE TABLE holds (
  worker TEXT PRIMARY KEY NOT NULL,
  holder TEXT NOT NULL,
  since  TEXT NOT NULL,
  canary TEXT NOT NULL
) STRICT;
