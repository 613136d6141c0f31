--
-- sweep_window: the setting, and when a window is open
--
-- No SQL function of the extension tells; the library's is called here.
SELECT probin AS library FROM pg_proc WHERE proname = 'idem_key' \gset
CREATE FUNCTION is_open(sweep_window text, at timestamptz) RETURNS boolean LANGUAGE C AS :'library', 'idem_window_test';

-- What is a window, and what isn't
SELECT w, is_open(w, '2026-06-01 03:00+00') FROM unnest('{"",  "   ",01:00-05:00,1:00-5:00," 01:00 - 05:00 ",00:00-24:00,00:01-00:00,23:59-00:00,22:00-24:00,22:30-06:00}'::text[]) w;
\set VERBOSITY default
SELECT is_open('01:00', now());
\set VERBOSITY terse
SELECT is_open('01:00-', now());
SELECT is_open('-05:00', now());
SELECT is_open('01:00-05:00x', now());
SELECT is_open('01:00-05:00-06:00', now());
SELECT is_open('1-5', now());
SELECT is_open('01:0-05:00', now());
SELECT is_open('001:00-05:00', now());
SELECT is_open('01:60-05:00', now());
SELECT is_open('01:00-24:01', now());
SELECT is_open('24:00-05:00', now());
SELECT is_open('25:00-05:00', now());
SELECT is_open('-1:00-05:00', now());
SELECT is_open('01:00:00-05:00:00', now());
\set VERBOSITY default
SELECT is_open('01:00-01:00', now());
SELECT is_open('00:00-00:00', now());

-- Both edges: the first minute is inside, the last one outside.
SET TIME ZONE 'UTC';
SELECT w, t, is_open(w, ('2026-06-01 ' || t)::timestamptz)
  FROM unnest('{01:00-05:00,22:30-06:00}'::text[]) w,
       unnest('{00:00,00:59:59.999999,01:00,04:59:59.999999,05:00,05:59:59,06:00,22:29:59,22:30,23:59:59.999999}'::text[]) t;
SELECT t, is_open('22:00-24:00', t), is_open('00:00-24:00', t) FROM unnest('{1969-12-31 23:59:59.5+00,1970-01-01 00:00+00,1999-12-31 22:00+00}'::timestamptz[]) t;

-- It is the clock on the wall of the time zone that counts.
SET TIME ZONE 'Asia/Kolkata';
SELECT is_open('05:30-05:31', '2026-06-01 00:00+00'), is_open('00:00-00:01', '2026-06-01 00:00+00');
SET TIME ZONE 'Pacific/Auckland';
SELECT is_open('12:00-12:01', '2026-06-01 00:00+00'), is_open('13:00-13:01', '2026-12-01 00:00+00');

-- Days on which clocks are changed.  In spring the hour from 2 to 3 is left out:
-- a window in it does not open, one that begins in it opens at its end.
SET TIME ZONE 'Europe/Berlin';
SELECT at, is_open('02:00-03:00', at) AS inside, is_open('02:30-05:00', at) AS begins, is_open('01:00-02:30', at) AS ends, is_open('22:00-02:30', at) AS night
  FROM generate_series('2026-03-29 00:30+00'::timestamptz, '2026-03-29 01:45+00', '15 min') at;
-- In autumn it comes twice, and so does the window.
SELECT at, is_open('02:00-03:00', at) AS inside, is_open('02:30-05:00', at) AS begins, is_open('01:00-02:30', at) AS ends, is_open('22:00-02:30', at) AS night
  FROM generate_series('2026-10-24 23:45+00'::timestamptz, '2026-10-25 02:15+00', '15 min') at;
-- How long it is open on these days and on others
SELECT d::date, count(*) FILTER (WHERE is_open('01:00-05:00', at)) / 60.0 AS hours, count(*) FILTER (WHERE is_open('22:00-06:00', at)) / 60.0 AS over_midnight, count(*) / 60.0 AS day
  FROM unnest('{2026-03-29,2026-06-01,2026-10-25}'::timestamptz[]) d, generate_series(d, d + '1 day' - interval '1 min', '1 min') at GROUP BY d ORDER BY d;
RESET TIME ZONE;

-- The setting is the server's, and so are the others of the worker.
SET idempotency.sweep_window = '01:00-05:00';
ALTER SYSTEM SET idempotency.sweep_window = '01:00-01:00';
ALTER SYSTEM SET idempotency.sweep_window = 'at night';
ALTER SYSTEM SET idempotency.databases = 'a,,b';
\set VERBOSITY sqlstate
ALTER SYSTEM SET idempotency.naptime = 0;
SET idempotency.worker = off;
SET idempotency.databases = 'a';
SET idempotency.naptime = '1h';
SHOW idempotency.sweep_window;
\set VERBOSITY default
DROP FUNCTION is_open;
