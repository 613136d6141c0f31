# Batches of many sessions that have the same keys: no deadlock, no error of any
# kind, and one owner a key at a time.
#
# Each session writes down when it has had a key, by the clock, from when it was
# told so to when it was about to give it back.  These times are looked at when
# all is over; they must not overlap, whatever became of the transactions.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use Test::More;

my $sessions = 16;
my $rounds = 1008;			# of all sessions together
my $keys = 200;

my $node = new_node('batches', conf => "max_connections = 50\ndeadlock_timeout = 100ms\n");
my $admin = session($node);
my @levels = ('read committed', 'repeatable read', 'serializable');

$admin->value(q{
CREATE UNLOGGED TABLE held (key text, token bigint, since timestamptz, until timestamptz, kept boolean);
CREATE TABLE round (kind text);

-- All keys, in an order of the moment.
CREATE FUNCTION shuffled(names text[]) RETURNS text[] LANGUAGE sql AS
	$$ SELECT array_agg(n ORDER BY random()) FROM unnest(names) n $$;

-- Tells of keys that the caller has had since then; tokens are null for messages.
CREATE PROCEDURE note(names text[], tokens bigint[], since timestamptz, until timestamptz, kept boolean) LANGUAGE sql AS
	$$ INSERT INTO held SELECT name, token, since, until, kept FROM unnest(names, tokens) AS n(name, token) $$;

CREATE PROCEDURE play(rounds int, names text[]) LANGUAGE plpgsql AS $$
DECLARE
	kinds constant text[] := '{own,partly,rolled back,leased,messages,messages rolled back,single,mixed}';
	kind text;
	mine text[];
	tokens bigint[];
	seen text[];
	since timestamptz;
	until timestamptz;
	kept boolean;
	done bigint;
BEGIN
	FOR n IN 1 .. rounds LOOP
		kind := kinds[1 + (random() * 1e6)::int % cardinality(kinds)];
		kept := kind NOT LIKE '%rolled back';
		seen := '{}';
		mine := '{}';
		tokens := '{}';

		-- Messages come first: who waits for one while he holds claims orders
		-- his keys himself.
		IF kind LIKE 'messages%' OR kind = 'mixed' THEN
			SELECT coalesce(array_agg(k), '{}') INTO seen
			FROM idem_once_many(shuffled(CASE kind WHEN 'mixed' THEN names[1:20] ELSE names END), ttl => '1 ms') k;
		END IF;
		IF kind = 'single' THEN
			SELECT coalesce(array_agg(k), '{}'), coalesce(array_agg(c.token), '{}') INTO mine, tokens
			FROM unnest((shuffled(names))[1:20]) k, idem_claim(k, wait => '2 ms', lease => '1 h') c
			WHERE c.outcome = 'claimed';
		ELSIF kind NOT LIKE 'messages%' THEN
			SELECT coalesce(array_agg(c.key), '{}'), coalesce(array_agg(c.token), '{}') INTO mine, tokens
			FROM idem_claim_many(shuffled(names), lease => '1 h') c WHERE c.outcome = 'claimed';
		END IF;

		since := clock_timestamp();
		IF kind = 'partly' THEN
			BEGIN
				PERFORM idem_complete_many(mine, tokens, ttl => '1 ms');
				RAISE division_by_zero;
			EXCEPTION WHEN division_by_zero THEN
				NULL;
			END;
		ELSIF kind = 'leased' THEN
			COMMIT;
		END IF;
		until := clock_timestamp();
		done := idem_complete_many(mine, CASE WHEN kind IN ('leased', 'partly') THEN tokens END, ttl => '1 ms');
		IF done <> cardinality(mine) THEN
			RAISE '%: % of % claims are completed', kind, done, cardinality(mine);
		END IF;
		IF kind <> 'leased' THEN
			until := clock_timestamp();
		END IF;
		IF kept THEN
			COMMIT;
		ELSE
			ROLLBACK;
		END IF;
		CALL note(mine, tokens, since, until, kept);
		-- A message that has expired meanwhile may have become a claim.
		seen := ARRAY(SELECT unnest(seen) EXCEPT SELECT unnest(mine));
		CALL note(seen, NULL, since, until, kept);
		INSERT INTO round VALUES (kind);
		COMMIT;
	END LOOP;
END $$});

my @players = map { session($node) } 1 .. $sessions;
$players[$_]->value("SET default_transaction_isolation = '$levels[$_ % 3]'") foreach 0 .. $#players;
my $names = join(',', map { "k$_" } 1 .. $keys);
my $turns = 7;
foreach my $turn (1 .. $turns)
{
	$_->send("CALL play($rounds / $sessions / $turns, '{$names}')") foreach @players;
}
my %errors;
foreach my $player ((@players) x $turns)
{
	my $error = $player->result->{error};
	$errors{"$error->{C} $error->{M}"}++ if $error;
}
is(join('; ', sort keys %errors), '', 'no session has had an error');
is($admin->value('SELECT count(*) FROM round'), $rounds, 'all rounds were played');
is($admin->value(q{SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()}), '0', 'there was no deadlock');
is($admin->value(q{SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND database <> 0}), '0', 'no lock is left');

is($admin->value(q{SELECT count(DISTINCT key) FROM held}), $keys, 'every key was had');
cmp_ok($admin->value(q{SELECT min(n) FROM (SELECT count(*) AS n FROM held GROUP BY key) k}), '>', 1, 'more than once');
is($admin->value(
		q{SELECT count(*) FROM (SELECT until > lead(since) OVER (PARTITION BY key ORDER BY since) AS is_shared FROM held) h
		  WHERE is_shared}), '0', 'by one owner at a time');
is($admin->value(
		q{SELECT count(*) FROM (SELECT token < lag(token) OVER (PARTITION BY key ORDER BY since) AS is_older
								FROM held WHERE token IS NOT NULL) h WHERE is_older}), '0', 'with rising tokens');
is($admin->value(q{SELECT count(*) FROM held WHERE token IS NOT NULL GROUP BY key, token HAVING count(*) > 1}), '',
	'and none twice');

no_faults($node);
$node->stop;
done_testing();
