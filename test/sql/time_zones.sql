--
-- time_zones: the same answers whatever TimeZone and DateStyle are, also across a change of the clocks
--
TRUNCATE idempotency_keys;
\pset null -
-- Claimed in one zone, asked in another: the answer, and the instants as numbers
CREATE TABLE zones (n serial, zone text);
INSERT INTO zones (zone) VALUES ('UTC'), ('Asia/Tokyo'), ('America/New_York'), ('Pacific/Kiritimati'), ('Pacific/Pago_Pago'), ('Asia/Kathmandu'), ('Australia/Lord_Howe'),
    ('<+15>-15'), ('America/Sao_Paulo');
CREATE PROCEDURE pg_temp.around_the_world() LANGUAGE plpgsql AS $$
DECLARE
    a record;
    b record;
    c record;
    other record;
    wrong int := 0;
BEGIN
    FOR a IN SELECT * FROM zones ORDER BY n LOOP
        PERFORM set_config('TimeZone', a.zone, true);
        SELECT extract(epoch FROM created_at) AS created, extract(epoch FROM expires_at) AS expires, token INTO c
            FROM idem_claim('zone-' || a.n, '{"n": 1}', ttl => '1 month 1 day', lease => '1 hour');
        IF abs(c.created - extract(epoch FROM clock_timestamp())) > 60 OR c.expires - c.created <> 31 * 86400 THEN wrong := wrong + 1; END IF;
        FOR b IN SELECT * FROM zones LOOP
            PERFORM set_config('TimeZone', b.zone, true);
            SELECT outcome, extract(epoch FROM created_at) AS created, extract(epoch FROM expires_at) AS expires, retry_after INTO other FROM idem_claim('zone-' || a.n, '{"n": 1}');
            IF other.outcome <> 'processing' OR other.created <> c.created OR other.expires <> c.expires OR other.retry_after NOT BETWEEN '0.001 s' AND '1 hour' THEN wrong := wrong + 1; END IF;
            SELECT status, expired, extract(epoch FROM lease_until) AS lease INTO other FROM idem_get('zone-' || a.n);
            IF other.status <> 'processing' OR other.expired OR other.lease - c.created <> 3600 THEN wrong := wrong + 1; END IF;
        END LOOP;
        PERFORM idem_complete('zone-' || a.n, '1', c.token, ttl => '1 day');
        SELECT extract(epoch FROM expires_at - completed_at) AS kept INTO other FROM idem_get('zone-' || a.n);
        IF other.kept <> 86400 THEN wrong := wrong + 1; END IF;
    END LOOP;
    RAISE INFO '% wrong answers', wrong;
END $$;
\set VERBOSITY terse
CALL pg_temp.around_the_world();

-- One that expires, or ends its lease, does so everywhere at once.
SET TimeZone = 'Pacific/Kiritimati';
SELECT idem_complete('east', '1', token, ttl => '1 ms') FROM idem_claim('east');
SELECT idem_renew('east-lease', token, '1 ms') IS NOT NULL AS set_up FROM idem_claim('east-lease');
SELECT idem_fail('east-retry', '1', token, disposition => 'retry', retry_after => '1 ms') FROM idem_claim('east-retry');
SET TimeZone = 'Pacific/Pago_Pago';
SELECT idem_complete('west', '1', token, ttl => '1 ms') FROM idem_claim('west');
SELECT idem_renew('west-lease', token, '1 ms') IS NOT NULL AS set_up FROM idem_claim('west-lease');
SELECT idem_fail('west-retry', '1', token, disposition => 'retry', retry_after => '1 ms') FROM idem_claim('west-retry');
DO $$ BEGIN PERFORM pg_sleep(0.01); END $$;
SELECT key, expired FROM unnest('{east,west}'::text[]) k, idem_get(k);
SELECT k, outcome, attempt FROM unnest('{east,east-lease,east-retry}'::text[]) k, idem_claim(k);
SET TimeZone = 'Pacific/Kiritimati';
SELECT key, expired FROM unnest('{east,west}'::text[]) k, idem_get(k);
SELECT k, outcome, attempt FROM unnest('{west,west-lease,west-retry}'::text[]) k, idem_claim(k);

-- A day is 24 hours, also where a night of 23 or 25 lies within it; a month is
-- 30 days, and a year twelve of them.
SET TimeZone = 'America/New_York';
SELECT span, extract(epoch FROM c.expires_at - c.created_at)::bigint AS ttl, extract(epoch FROM g.lease_until - g.created_at)::bigint AS lease
    FROM unnest('{1 day,24 hours,7 days,200 days,1 month,7 months,1 year,1 month -1 day,1 day -1 hour}'::text[]) span,
         idem_claim('span ' || span, ttl => span::interval, lease => span::interval) c, idem_get('span ' || span) g;
SELECT span, extract(epoch FROM idem_renew('span 1 day', token, span::interval) - clock_timestamp()) BETWEEN extract(epoch FROM span::interval) - 60 AND extract(epoch FROM span::interval) AS lease
    FROM unnest('{1 day,200 days,400 days}'::text[]) span, (SELECT token FROM idempotency_keys WHERE key = 'span 1 day') t;
SELECT idem_fail('span 200 days', token => token, disposition => 'retry', retry_after => '200 days', ttl => '300 days') FROM idempotency_keys WHERE key = 'span 200 days';
SELECT extract(epoch FROM expires_at - completed_at)::bigint AS kept, extract(epoch FROM retry_at - completed_at)::bigint AS retry FROM idempotency_keys WHERE key = 'span 200 days';
SELECT retry_after BETWEEN '199 days 23:59' AND '200 days' AS retry FROM idem_claim('span 200 days');

-- DateStyle and IntervalStyle are for what is printed.
SET DateStyle = 'German, DMY';
SET IntervalStyle = 'iso_8601';
SELECT outcome, retry_after BETWEEN '0.001 s' AND '1 day' AS retry, expires_at - created_at AS ttl FROM idem_claim('span 1 month');
SELECT outcome FROM idem_claim('style', lease => 'PT90S', ttl => 'P1DT1H');
SELECT lease_until - created_at AS lease, expires_at - created_at AS ttl FROM idem_get('style');
RESET ALL;
DROP TABLE zones;
