-- How many times a fak on a server has claimed this ledger. One that lost its claim, and finds
-- another number than its own, knows that another fak had the ledger meanwhile.
CREATE TABLE ledger_claims (claims BIGINT NOT NULL);
INSERT INTO ledger_claims (claims) VALUES (0);
