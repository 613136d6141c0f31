# Several databases, in every kind of encoding and collation: each has its own
# keys, and the same text has the same fingerprint and UUID in all of them.
#
# Strings in this file are bytes, those of UTF-8 where they are not ASCII.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";
use File::Temp qw(tempdir);
use IdemTest;
use POSIX ();
use Test::More;

# Turkish has its own ideas about i and I.  Where the system lacks the locale,
# we make it for our server.
my $turkish = POSIX::setlocale(POSIX::LC_ALL(), 'tr_TR.UTF-8');
POSIX::setlocale(POSIX::LC_ALL(), 'C');
if (!$turkish && -e '/usr/share/i18n/locales/tr_TR')
{
	my $folder = tempdir(CLEANUP => 1);
	system("localedef -i tr_TR -f UTF-8 --no-archive $folder/tr_TR.UTF-8 >/dev/null 2>&1");
	if (-d "$folder/tr_TR.UTF-8")
	{
		$ENV{LOCPATH} = $folder;
		$turkish = 1;
	}
}

my $node = new_node('databases', extension => 0);
my $admin = session($node);
my $icu = $admin->value(q{SELECT count(*) > 0 FROM pg_collation WHERE collprovider = 'i'}) eq 't';
my $builtin = $admin->value(q{SELECT current_setting('server_version_num')::int >= 170000}) eq 't';

# name => [ options, does it hold all of Unicode? ]
my %database = (
	utf8_c => [ q{ENCODING 'UTF8' LOCALE 'C'}, 1 ],
	utf8_c_utf8 => [ q{ENCODING 'UTF8' LOCALE 'C.UTF-8'}, 1 ],
	latin1 => [ q{ENCODING 'LATIN1' LOCALE 'C'}, 0 ],
	sql_ascii => [ q{ENCODING 'SQL_ASCII' LOCALE 'C'}, 1 ],
	euc_jp => [ q{ENCODING 'EUC_JP' LOCALE 'C'}, 0 ]);
$database{utf8_turkish} = [ q{ENCODING 'UTF8' LOCALE 'tr_TR.UTF-8'}, 1 ] if $turkish;
$database{utf8_builtin} =
  [ q{ENCODING 'UTF8' LOCALE_PROVIDER builtin BUILTIN_LOCALE 'C.UTF-8' LOCALE 'C'}, 1 ]
  if $builtin;
if ($icu)
{
	$database{utf8_icu} = [ q{ENCODING 'UTF8' LOCALE_PROVIDER icu ICU_LOCALE 'en-US' LOCALE 'C'}, 1 ];

	# Case does not count here, but for breaking ties.
	$database{utf8_icu_level2} =
	  [ q{ENCODING 'UTF8' LOCALE_PROVIDER icu ICU_LOCALE 'und-u-ks-level2' LOCALE 'C'}, 1 ];
	$database{latin1_icu} =
	  [ q{ENCODING 'LATIN1' LOCALE_PROVIDER icu ICU_LOCALE 'tr-TR' LOCALE 'C'}, 0 ];
}
SKIP: { skip 'no locale tr_TR.UTF-8 (package locales)', 1 unless $turkish; pass('locale tr_TR.UTF-8'); }
SKIP: { skip 'this server was built without ICU', 1 unless $icu; pass('ICU'); }

my %db;
foreach my $name (sort keys %database)
{
	$admin->value("CREATE DATABASE $name TEMPLATE template0 $database{$name}[0]");
	$db{$name} = session($node, dbname => $name);
	$db{$name}->value('CREATE EXTENSION idempotency');
}
my @names = sort keys %database;
my @unicode = grep { $database{$_}[1] } @names;

#
# The same text, the same digest.
#
my @everywhere = (
	'{}', '{"a": null}', '[1, 2]', '"i"', '"I"', '{"i": 1, "I": 2, "z": 3}',
	'{"bb": 1, "a": 2, "C": 3}', '{"ä": 1, "z": 2, "a": 3}', '"ä"', '{"ä": {"ö": ["ß", "ø"]}}',
	'{"aa": 1, "ä": 2, "b": 3}', '1.50', '"\u00e4"', '{"\u00e4": 1}');
my @with_unicode = ('{"ı": 1, "i": 2}', '"ı"', '{"€": 1, "aa": 2, "b": 3}', '"😀"', '{"ı": 1, "ää": 2, "I": 3, "zzz": 4}');

sub check_same
{
	my ($call, $what, @where) = @_;
	my $expected = $db{utf8_c}->value("SELECT $call");
	my @different = grep { $db{$_}->value("SELECT $call") ne $expected } @where;
	is("@different", '', "$what is the same in " . scalar(@where) . ' databases');
	return;
}

# A \u escape above ASCII is refused by jsonb itself where there is no such character.
foreach my $request (@everywhere)
{
	my @where = grep { $request !~ /\\u/ || $_ ne 'sql_ascii' } @names;
	check_same('encode(idem_fingerprint(' . sql_quote($request) . "), 'hex')", "the fingerprint of $request", @where);
}
check_same('encode(idem_fingerprint(' . sql_quote($_) . "), 'hex')", "the fingerprint of $_", @unicode)
  foreach @with_unicode;
check_same('encode(idem_fingerprint(' . sql_quote('{"ä": 1, "b": {"ö": 2}}') . ", '{ä,b.ö}'), 'hex')",
	'a fingerprint without a member', @names);
check_same('idem_uuid(' . sql_quote('Größe') . ', ' . sql_quote('überall') . ')', 'a UUID', @names);
check_same('idem_uuid(' . sql_quote($_) . ')', "the UUID of $_", @names) foreach qw(i I z ä);
check_same('idem_uuid(' . sql_quote('ı€') . ')', 'a UUID with more than ISO 8859-1', @unicode);
check_same('idem_key(' . sql_quote('ä:ö') . ', ' . sql_quote('\\ß') . ')', 'a key made of parts', @names);

is($db{latin1}->value('SELECT encode(idem_fingerprint(' . sql_quote('"ä"') . "), 'hex')
	= encode(idem_fingerprint(" . sql_quote('"\u00e4"') . "), 'hex')"), 't', 'an escape is the character it stands for');

#
# Keys are bytes: none is folded, trimmed or normalized.  The last is
# another spelling of ä, of which Unicode says that it is the same.
#
foreach my $name (@names)
{
	my @keys = ('i', 'I', 'z', 'Z', 'ä', 'Ä', 'k', 'k ', ' k', "k\t");
	push @keys, 'ı', 'İ', 'ß', 'ss', "a\xcc\x88" if $database{$name}[1];
	my %seen;
	@keys = grep { !$seen{$_}++ } @keys;
	my $s = $db{$name};

	$s->value('SELECT idem_complete(k, to_jsonb(n), (idem_claim(k)).token) FROM unnest(ARRAY['
		  . join(', ', map { sql_quote($_) } @keys) . ']) WITH ORDINALITY u(k, n)');
	is($s->value('SELECT count(*) FROM idempotency_keys'), scalar @keys, "$name: all keys are distinct");
	my $n = 0;
	my @wrong = grep {
		++$n;
		$s->value('SELECT outcome, response FROM idem_claim(' . sql_quote($_) . ')') ne "completed|$n"
	} @keys;
	is("@wrong", '', "$name: each has its own result");
	is($s->value('SELECT count(*) FROM idempotency_keys WHERE key = ' . sql_quote('i') . ' AND scope = ' . sql_quote('')),
		'1', "$name: and a query by hand finds the one");
	is($s->value('SELECT string_agg(key, ' . sql_quote(',') . ' ORDER BY scope, key) FROM idempotency_keys WHERE key ~ '
			  . sql_quote('^[iIzZ]$')), 'I,Z,i,z', "$name: keys are in the order of their bytes");
	$s->value(q{SELECT idem_claim('k', scope => 'A'), idem_claim('k', scope => 'a')});
	is($s->value(q{SELECT count(*) FROM idempotency_keys WHERE lower(scope) = 'a'}), '2', "$name: so are scopes");
	is($s->value(q{SELECT outcome FROM idem_claim('k', operation => 'X', scope => 'A')}), 'mismatch',
		"$name: and operations");
}

#
# 255 characters, however many bytes each has.
#
my %wide = (
	latin1 => 'ä', latin1_icu => 'ä', euc_jp => '日', utf8_c => '😀', utf8_turkish => '😀', utf8_icu_level2 => '日');
foreach my $name (sort grep { $db{$_} } keys %wide)
{
	my $s = $db{$name};
	my $c = $wide{$name};
	foreach my $call ('idem_claim(%s)', 'idem_claim(%1$s, scope => %1$s, operation => %1$s)', 'idem_uuid(%s)')
	{
		my $longest = sprintf($call, 'repeat(' . sql_quote($c) . ', 255)');
		my $too_long = sprintf($call, 'repeat(' . sql_quote($c) . ', 256)');
		ok(!$s->query("SELECT $longest")->{error}, "$name: 255 times $c in $call");
		is_sqlstate($s, "SELECT $too_long", 'IK400', "$name: 256 times $c in $call");
	}
}
is_sqlstate($db{sql_ascii}, 'SELECT idem_claim(repeat(' . sql_quote('ä') . ', 128))', 'IK400',
	'sql_ascii: a byte is a character');

#
# What the database's encoding can't hold, or no encoding can.
#
sub check_refused
{
	my ($name, $sql, $sqlstate, $what) = @_;
	my $rows = $db{$name}->value('SELECT count(*) FROM idempotency_keys');
	is_sqlstate($db{$name}, $sql, $sqlstate, "$name: $what is refused");
	is($db{$name}->value('SELECT count(*) FROM idempotency_keys'), $rows, "$name: $what changes nothing");
	return;
}
check_refused('latin1', 'SELECT idem_claim(' . sql_quote('ı') . ')', '22P05', 'a character it lacks');
check_refused('latin1', q{SELECT idem_claim('new', '"\u0131"')}, '22P05', 'an escape for a character it lacks');
{
	my $bad = "SELECT idem_claim('new\xff')";
	check_refused($_, $bad, '22021', 'a byte that is no UTF-8') foreach 'utf8_c', 'euc_jp';
	check_refused('utf8_c', "SELECT idem_claim('new', '\"\xc3\"')", '22021', 'half a character');
}
check_refused($_, q{SELECT idem_claim('new', '"\u0000"')}, '22P05', 'U+0000') foreach @names;
check_refused($_, q{SELECT idem_claim(convert_from('\x6e657700', getdatabaseencoding()))}, '22021', 'a NUL byte')
  foreach @names;

# Valid in the database's encoding, but nowhere in Unicode, so it has no
# fingerprint; as a key it is bytes like any other.
{
	my $jp = session($node, dbname => 'euc_jp', encoding => 'EUC_JP');
	my $unassigned = "\xa9\xa1";
	is_sqlstate($jp, qq{SELECT idem_claim('new', '"$unassigned"')}, 'IK400', 'euc_jp: a request outside Unicode is refused');
	is_sqlstate($jp, qq{SELECT idem_fingerprint('{"$unassigned": 1}')}, 'IK400', 'euc_jp: as the name of a member, too');
	is($jp->value(q{SELECT count(*) FROM idempotency_keys WHERE key = 'new'}), '0', 'euc_jp: it changes nothing');
	is($jp->value(qq{SELECT outcome FROM idem_claim('$unassigned')}), 'claimed', 'euc_jp: as a key it is good');
	is_sqlstate($jp, qq{SELECT idem_uuid('$unassigned')}, 'IK400', 'euc_jp: but has no UUID');
}

# The client's encoding is not the database's.
{
	my $latin1_client = session($node, dbname => 'utf8_c', encoding => 'LATIN1');
	is($latin1_client->value("SELECT response FROM idem_claim('\xe4')"), '5',
		'a client of another encoding finds the same key');

	# What it is told of an error is whole characters, wherever it is cut.
	foreach my $shift ('', 'x')
	{
		$latin1_client->value(qq{CREATE OR REPLACE FUNCTION complain() RETURNS trigger LANGUAGE plpgsql
			AS \$\$BEGIN RAISE EXCEPTION '%', '$shift' || repeat('\xe4', 300); END\$\$});
		$latin1_client->value(q{CREATE TRIGGER complain AFTER DELETE ON idempotency_keys FOR EACH ROW EXECUTE FUNCTION complain()})
		  if $shift eq '';
		$latin1_client->value(q{SELECT idem_once('complain', ttl => '1 ms'), pg_sleep(0.01)});
		is($latin1_client->value('SELECT idem_sweep()'), '0', "an error text that is cut after '$shift'");
	}
	$latin1_client->value(q{DROP TRIGGER complain ON idempotency_keys; SELECT idem_forget('complain')});
}

#
# Databases have nothing to do with each other.
#
my ($x, $y) = @db{ 'utf8_c', 'latin1' };
$x->value(q{BEGIN; SELECT idem_claim('shared name', lease => '1 h')});
is($y->value(q{SELECT outcome FROM idem_claim('shared name')}), 'claimed', 'the same key in another database is free');
is($y->value(q{SELECT idem_complete('shared name', '1', token) FROM idempotency_keys WHERE key = 'shared name'}), 't',
	'and can be completed meanwhile');
$x->value('COMMIT');
is($x->value(q{SELECT outcome FROM idem_claim('shared name')}), 'processing', 'without a trace in the first');
my $foreign_token = $y->value(q{SELECT token FROM idem_claim('other')});
is_sqlstate($x, qq{SELECT idem_complete('other', '1', $foreign_token)}, 'IK404', 'a claim of one is none in the other');

#
# A database made from another one as its template.
#
$admin->value(q{CREATE DATABASE original TEMPLATE template0});
my $original = session($node, dbname => 'original');
$original->value(q{CREATE EXTENSION idempotency});
$original->value(q{SELECT idem_claim('done'), idem_complete('done', '"copied"')});
$original->value(q{SELECT idem_claim('done by one'), idem_forget('done by one')});
my $token = $original->value(q{SELECT token FROM idem_claim('open', lease => '1 h')});
$original->close;
wait_until(sub { $admin->value(q{SELECT count(*) FROM pg_stat_activity WHERE datname = 'original'}) eq '0' },
	'the session to leave the template');
$admin->value(q{CREATE DATABASE copy TEMPLATE original});
($original, my $copy) = map { session($node, dbname => $_) } qw(original copy);
foreach my $s ($original, $copy)
{
	my $name = $s == $copy ? 'copy' : 'original';
	is($s->value(q{SELECT outcome, response FROM idem_claim('done')}), 'completed|"copied"', "$name: a result");
	is($s->value(q{SELECT outcome FROM idem_claim('open')}), 'processing', "$name: an open claim");
	is($s->value(qq{SELECT idem_complete('open', '"$name"', $token)}), 't', "$name: is completed");
	cmp_ok($s->value(q{SELECT token FROM idem_claim('done by one')}), '>', $token, "$name: tokens go on");
}
is($original->value(q{SELECT response FROM idem_claim('open')}), '"original"', 'each by itself: the original');
is($copy->value(q{SELECT response FROM idem_claim('open')}), '"copy"', 'each by itself: the copy');
is($copy->value(q{SELECT idem_forget('done')}), 't', 'what is deleted in the copy');
is($original->value(q{SELECT outcome FROM idem_claim('done')}), 'completed', 'stays in the original');

no_faults($node);
$node->stop;
done_testing();
