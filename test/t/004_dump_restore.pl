# pg_dump and pg_restore: keys in each state mean after the restore what they
# meant before, in another cluster, another database, another format.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use IdemTest;
use PostgreSQL::Test::Utils;
use Test::More;

my $source = new_node('source', extension => 0);
my $target = new_node('target', extension => 0);
my $folder = PostgreSQL::Test::Utils::tempdir();
my $at_source = session($source);
my $at_target = session($target);

$_->value('CREATE ROLE app; CREATE ROLE stranger') foreach $at_source, $at_target;

# The keys, and what a claim of each answers, before and after.
my %key = (
	completed => q{SELECT S.idem_claim('completed', '{"n": 1}', operation => 'pay'),
		S.idem_complete('completed', '{"receipt": 1}', http_status => 201,
			headers => '[["Set-Cookie", "a"], ["Set-Cookie", "b"]]', body => '\x00ff0a5c')},
	'completed empty' => q{SELECT S.idem_claim('completed empty'), S.idem_complete('completed empty')},
	'completed null' => q{SELECT S.idem_claim('completed null'), S.idem_complete('completed null', 'null', body => '')},
	'completed large' => q{SELECT S.idem_claim('completed large'), S.idem_complete('completed large',
		(SELECT jsonb_agg(md5(n::text)) FROM generate_series(1, 2000) n))},
	failed => q{SELECT S.idem_claim('failed', '{"n": 1}', operation => 'pay'),
		S.idem_fail('failed', '"declined"', http_status => 402)},
	unknown => q{SELECT S.idem_claim('unknown', '{"n": 1}', operation => 'pay'),
		S.idem_fail('unknown', disposition => 'unknown')},
	held => q{SELECT S.idem_claim('held', '{"n": 1}', operation => 'pay', ttl => '1 ms', lease => '1 ms', takeover => false)},
	processing => q{SELECT S.idem_claim('processing', '{"n": 1}', operation => 'pay', lease => '1 h')},
	ended => q{SELECT S.idem_checkpoint('ended', (S.idem_claim('ended', lease => '1 ms')).token, 'step 2', '{"cart": 7}')},
	retryable => q{SELECT S.idem_claim('retryable', '{"n": 1}', operation => 'pay'),
		S.idem_fail('retryable', disposition => 'retry', retry_after => '1 h')},
	repeatable => q{SELECT S.idem_claim('repeatable'), S.idem_fail('repeatable', disposition => 'retry')},
	expired => q{SELECT S.idem_claim('expired'), S.idem_complete('expired', '1', ttl => '1 ms')},
	resolved => q{SELECT S.idem_claim('resolved'), S.idem_resolve('resolved', 'completed', '1', note => 'by hand')},
	"ta\tb\nand \\ 'quotes'" => q{SELECT S.idem_claim(k), S.idem_complete(k, '"odd"') FROM (VALUES (E'ta\tb\nand \\\\ ''quotes''')) v(k)});
my %outcome = (
	held => 'unknown|1|', ended => 'claimed|2|step 2', repeatable => 'claimed|2|', expired => 'claimed|1|',
	resolved => 'completed|1|', map({ $_ => "$_|1|" } qw(completed failed unknown processing retryable)),
	map({ $_ => 'completed|1|' } 'completed empty', 'completed null', 'completed large', "ta\tb\nand \\ 'quotes'"));

# Every row, all of it, and what idem_get makes of it.
sub contents
{
	my ($session, $schema) = @_;
	return $session->value(
		"SELECT k::text, g::text FROM $schema.idempotency_keys k, $schema.idem_get(k.key, k.scope) g ORDER BY k.scope, k.key");
}

sub fill
{
	my ($session, $schema) = @_;
	$session->value(q{CREATE TABLE payments (scope text NOT NULL, key text NOT NULL)});
	foreach my $key (sort keys %key)
	{
		$session->value($key{$key} =~ s/\bS\./$schema./gr);
	}
	$session->value("SELECT $schema.idem_claim('scoped', scope => 'tenant'), $schema.idem_complete('scoped', '9', scope => 'tenant')");
	$session->value("SELECT $schema.idem_grant('app')");

	# A foreign key, which the dump must restore after the keys.
	$session->value("ALTER TABLE payments ADD FOREIGN KEY (scope, key) REFERENCES $schema.idempotency_keys");
	$session->value(q{INSERT INTO payments VALUES ('', 'completed')});
	wait_until(
		sub {
			$session->value("SELECT count(*) FROM $schema.idempotency_keys
							 WHERE key IN ('held', 'ended') AND lease_until < clock_timestamp()
								 OR key = 'expired' AND expires_at < clock_timestamp()") eq '3';
		},
		'the short leases to end');
	return;
}

# What must hold after a restore into database DBNAME of NODE.
sub check_restored
{
	my ($name, $node, $dbname, $schema, %expected) = @_;
	my $s = session($node, dbname => $dbname);

	is(contents($s, $schema), $expected{contents}, "$name: every row is as it was");
	is($s->value("SELECT key FROM payments"), 'completed', "$name: and the foreign key to them");
	cmp_ok($s->value("SELECT last_value FROM $schema.idempotency_keys_token_seq"), '>=', $expected{last_token},
		"$name: the tokens are where they were");

	# As the application that had been granted the calls.
	$s->value('SET ROLE app');
	foreach my $key (sort keys %outcome)
	{
		next if $key =~ /^(?:processing|unknown|held)$/;
		my $request = $key =~ /^(?:completed|failed|retryable)$/ ? q{, '{"n": 1}', operation => 'pay'} : '';
		my $shown = $key =~ /[\t\n]/ ? 'with odd characters' : $key;
		is($s->value("SELECT outcome, attempt, checkpoint FROM $schema.idem_claim(" . sql_quote($key) . "$request)"),
			$outcome{$key}, "$name: a claim of the key $shown");
	}
	is($s->value("SELECT outcome FROM $schema.idem_claim('$_', '{\"n\": 1}', operation => 'pay')"),
		$outcome{$_} =~ s/\|.*//r, "$name: a claim of the key $_")
	  foreach qw(processing unknown held);
	is($s->value("SELECT outcome FROM $schema.idem_claim('$_', '{\"n\": 2}', operation => 'pay')"), 'mismatch',
		"$name: another request for the key $_")
	  foreach qw(completed failed processing unknown held retryable);
	is($s->value("SELECT outcome, response, http_status, headers, body FROM $schema.idem_claim('completed', operation => 'pay')"),
		'completed|{"receipt": 1}|201|[["Set-Cookie", "a"], ["Set-Cookie", "b"]]|\x00ff0a5c', "$name: a result is complete");
	is($s->value("SELECT outcome, response FROM $schema.idem_claim('scoped', scope => 'tenant')"), 'completed|9',
		"$name: a key of another scope");

	is_sqlstate($s, "SELECT $schema.idem_complete('processing', '1', $expected{token} + 1000)", 'IK410',
		"$name: an open claim is still its owner's alone");
	is($s->value("SELECT $schema.idem_complete('processing', '1', $expected{token})"), 't',
		"$name: who completes it with the old token");
	cmp_ok($s->value("SELECT token FROM $schema.idem_claim('forgotten')"), '>', $expected{forgotten},
		"$name: tokens rise, for a key that was deleted before the dump too");
	is_sqlstate($s, "SELECT $schema.idem_forget('completed')", '42501', "$name: the application's rights are as they were");
	$s->value('SET ROLE stranger');
	is_sqlstate($s, "SELECT $schema.idem_claim('completed')", '42501', "$name: others have none");
	is_sqlstate($s, "TABLE $schema.idempotency_keys", '42501', "$name: and the table is closed");
	$s->value('RESET ROLE');
	is_sqlstate($s, "SELECT $schema.idem_forget('completed')", '23503', "$name: the foreign key holds");
	$s->close;
	return;
}

# [ name, schema, what dumps and restores ]
my @ways = (
	[ 'plain', 'public', sub {
		my ($from, $to) = @_;
		$source->command_ok([ 'pg_dump', '--no-sync', '-f', "$folder/plain.sql", $from ], 'pg_dump, plain');
		$target->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-f', "$folder/plain.sql", $to ], 'psql');
	} ],
	[ 'inserts', 'public', sub {
		my ($from, $to) = @_;
		$source->command_ok([ 'pg_dump', '--no-sync', '--column-inserts', '-f', "$folder/inserts.sql", $from ], 'pg_dump, as INSERTs');
		$target->command_ok([ 'psql', '-X', '-q', '-1', '-v', 'ON_ERROR_STOP=1', '-f', "$folder/inserts.sql", $to ], 'psql');
	} ],
	[ 'custom', 'Idem Keys', sub {
		my ($from, $to) = @_;
		$source->command_ok([ 'pg_dump', '--no-sync', '-Fc', '-f', "$folder/custom", $from ], 'pg_dump, custom');
		$target->command_ok([ 'pg_restore', '--exit-on-error', '-d', $to, "$folder/custom" ], 'pg_restore');
	} ],
	[ 'directory', 'idem', sub {
		my ($from, $to) = @_;
		$source->command_ok([ 'pg_dump', '--no-sync', '-Fd', '-j2', '-f', "$folder/directory", $from ], 'pg_dump, directory');

		# Not in parallel: pg_restore does not know then that a foreign key to
		# an extension's table has to wait for that table's rows.
		$target->command_ok([ 'pg_restore', '--exit-on-error', '-d', $to, "$folder/directory" ], 'pg_restore');

		# And once more over what is there.
		$target->command_ok([ 'pg_restore', '--exit-on-error', '--clean', '--if-exists', '-d', $to, "$folder/directory" ],
			'pg_restore --clean');
	} ]);

foreach my $way (@ways)
{
	my ($name, $schema, $move) = @$way;
	my $quoted = qq{"$schema"};
	$at_source->value(qq{CREATE DATABASE "$name"});
	$at_target->value(qq{CREATE DATABASE "other $name" TEMPLATE template0});
	my $s = session($source, dbname => $name);
	$s->value(qq{CREATE SCHEMA IF NOT EXISTS $quoted}) if $schema ne 'public';
	$s->value(qq{CREATE EXTENSION idempotency SCHEMA $quoted});
	fill($s, $quoted);

	# Enough tokens to leave the block that the sequence logs ahead.
	$s->value("SELECT $quoted.idem_claim('forgotten'), $quoted.idem_forget('forgotten')") foreach 1 .. 35;
	my $forgotten = $s->value("SELECT token FROM $quoted.idem_claim('forgotten')");
	$s->value("SELECT $quoted.idem_forget('forgotten')");
	my %expected = (
		contents => contents($s, $quoted),
		token => $s->value("SELECT token FROM $quoted.idempotency_keys WHERE key = 'processing'"),
		last_token => $s->value("SELECT last_value FROM $quoted.idempotency_keys_token_seq"),
		forgotten => $forgotten);
	$move->($name, "other $name");
	check_restored($name, $target, "other $name", $quoted, %expected);
	is(contents($s, $quoted), $expected{contents}, "$name: the dump has changed nothing");
	$s->close;
}

# A schema-only dump has no keys, a data-only one nothing else.
$source->command_ok([ 'pg_dump', '--no-sync', '-Fc', '-f', "$folder/all", 'plain' ], 'pg_dump for parts');
$at_target->value('CREATE DATABASE parts TEMPLATE template0');
$target->command_ok([ 'pg_restore', '--exit-on-error', '-s', '-d', 'parts', "$folder/all" ], 'pg_restore, schema only');
my $parts = session($target, dbname => 'parts');
is($parts->value('SELECT count(*) FROM idempotency_keys'), '0', 'a schema alone brings no keys');
$target->command_ok(
	[ 'pg_restore', '--exit-on-error', '-a', '--disable-triggers', '-d', 'parts', "$folder/all" ], 'pg_restore, data only');
is($parts->value(q{SELECT outcome, response FROM idem_claim('completed', operation => 'pay')}), 'completed|{"receipt": 1}',
	'the data alone, into a new extension, is enough');

# The whole cluster.
$source->command_ok([ 'pg_dumpall', '--no-sync', '-f', "$folder/all.sql", '--exclude-database=inserts', '--exclude-database=directory' ],
	'pg_dumpall');
my $third = new_node('third', extension => 0);
$third->command_ok([ 'psql', '-X', '-q', '-f', "$folder/all.sql", 'postgres' ], 'psql');
my $all = session($third, dbname => 'custom');
is($all->value(q{SELECT outcome, response FROM "Idem Keys".idem_claim('completed', operation => 'pay')}),
	'completed|{"receipt": 1}', 'pg_dumpall brings the keys, too');

no_faults($_) foreach $source, $target, $third;
$_->stop foreach $source, $target, $third;
done_testing();
