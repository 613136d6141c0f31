/*-------------------------------------------------------------------------
 *
 * args.c
 *	  Reading and checking the arguments of the SQL functions.
 *
 * All of it happens before the table is opened, so bad input changes nothing.
 * A duration becomes microseconds at once: a day is 24 hours and a month 30
 * days, so neither the session's time zone nor a DST change has a say.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/detoast.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "common/int.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/timestamp.h"

#include "args.h"
#include "compat.h"
#include "settings.h"

bool
idem_is_writable(void)
{
	return !XactReadOnly && !RecoveryInProgress();
}

/*
 * A replay, a mismatch and processing are answered in a read-only transaction
 * and on a standby; everything else comes here first.
 */
void
idem_require_writable(const char *function)
{
	if (RecoveryInProgress())
		ereport(ERROR,
				(errcode(ERRCODE_READ_ONLY_SQL_TRANSACTION),
				 errmsg("cannot execute %s during recovery", function),
				 errhint("Send the call to the primary server.")));
	if (XactReadOnly)
		ereport(ERROR,
				(errcode(ERRCODE_READ_ONLY_SQL_TRANSACTION),
				 errmsg("cannot execute %s in a read-only transaction", function),
				 errhint("Begin the transaction with READ WRITE, or set \"default_transaction_read_only\" to off.")));
}

/* For a required argument, and what to pass instead of null. */
void
idem_bad_null(const char *what, const char *hint)
{
	ereport(ERROR,
			(errcode(IDEM_ERRCODE_BAD_INPUT),
			 errmsg("%s must not be null", what),
			 errhint("%s", hint)));
}

/* A text of at most 255 characters. */
static text *
checked_name(Datum value, const char *what)
{
	Size		bytes = toast_raw_datum_size(value) - VARHDRSZ;

	/* What is too long in any encoding isn't even detoasted. */
	if (bytes <= IDEM_MAX_NAME * MAX_MULTIBYTE_CHAR_LEN)
	{
		text	   *name = DatumGetTextPP(value);

		if (bytes <= IDEM_MAX_NAME ||
			pg_mbstrlen_with_len(VARDATA_ANY(name), (int) bytes) <= IDEM_MAX_NAME)
			return name;
	}
	ereport(ERROR,
			(errcode(IDEM_ERRCODE_BAD_INPUT),
			 errmsg("%s is too long", what),
			 errdetail("It may have at most %d characters.", IDEM_MAX_NAME),
			 errhint("Use a digest of it, such as encode(sha256(...), 'hex').")));
}

text *
idem_arg_name(FunctionCallInfo fcinfo, int arg, const char *what)
{
	if (PG_ARGISNULL(arg))
		idem_bad_null(what, "Pass a value, or leave the argument out where it has a default.");
	return checked_name(PG_GETARG_DATUM(arg), what);
}

/* The scope that applies: a confined role has just one. */
static text *
effective_scope(text *scope)
{
	Size		len = VARSIZE_ANY_EXHDR(scope);

	if (idem_scope_forged)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied to set parameter \"%s\"", "idempotency.scope"),
				 errhint("Connect again without setting it.")));
	if (idem_scope == NULL || idem_scope[0] == '\0')
		return scope;
	if (len == 0)
		return cstring_to_text(idem_scope);
	if (len != strlen(idem_scope) || memcmp(VARDATA_ANY(scope), idem_scope, len) != 0)
		ereport(ERROR,
				(errcode(ERRCODE_INSUFFICIENT_PRIVILEGE),
				 errmsg("permission denied for scope \"%s\"", text_to_cstring(scope)),
				 errdetail("Setting \"idempotency.scope\" confines this role to one scope."),
				 errhint("Leave the scope out.")));
	return scope;
}

text *
idem_arg_scope(FunctionCallInfo fcinfo, int arg)
{
	return effective_scope(idem_arg_name(fcinfo, arg, "scope"));
}

text *
idem_check_key(NullableDatum value)
{
	text	   *key;

	if (value.isnull)
		idem_bad_null("idempotency key", "Requests without a key of their own would all share one.");
	key = checked_name(value.value, "idempotency key");
	if (VARSIZE_ANY_EXHDR(key) == 0)
		ereport(ERROR,
				(errcode(IDEM_ERRCODE_BAD_INPUT),
				 errmsg("idempotency key must not be empty"),
				 errhint("Requests without a key of their own would all share one.")));
	return key;
}

IdemKey
idem_arg_key(FunctionCallInfo fcinfo, int key_arg, int scope_arg)
{
	IdemKey		name;

	name.key = idem_check_key(fcinfo->args[key_arg]);
	name.scope = idem_arg_scope(fcinfo, scope_arg);
	return name;
}

bytea *
idem_arg_hash(FunctionCallInfo fcinfo, int arg)
{
	Size		size;

	if (PG_ARGISNULL(arg))
		return NULL;
	size = toast_raw_datum_size(PG_GETARG_DATUM(arg)) - VARHDRSZ;
	if (size < 1 || size > 64)
		ereport(ERROR,
				(errcode(IDEM_ERRCODE_BAD_INPUT),
				 errmsg("request_hash has %zu bytes", size),
				 errdetail("It must have 1 to 64 bytes."),
				 errhint("Pass a digest such as sha256(body), not the request itself.")));
	return PG_GETARG_BYTEA_PP(arg);
}

bool
idem_arg_bool(FunctionCallInfo fcinfo, int arg, const char *what)
{
	if (PG_ARGISNULL(arg))
		idem_bad_null(what, "Pass true or false.");
	return PG_GETARG_BOOL(arg);
}

static void
bad_duration(const char *what, const char *detail)
{
	ereport(ERROR,
			(errcode(IDEM_ERRCODE_BAD_INPUT),
			 errmsg("%s is out of range", what),
			 errdetail("%s", detail),
			 errhint("Pass an interval such as '30 seconds' or '24 hours'.")));
}

/*
 * In microseconds; false if there are too many of them, and then the most that
 * there can be, of the right sign.
 */
bool
idem_interval_duration(const Interval *interval, int64 *duration)
{
	int64		days = (int64) interval->month * DAYS_PER_MONTH + interval->day;

	if (!idem_interval_is_infinite(interval) &&
		!pg_mul_s64_overflow(days, USECS_PER_DAY, duration) &&
		!pg_add_s64_overflow(*duration, interval->time, duration))
		return true;
	*duration = days < 0 ? PG_INT64_MIN : PG_INT64_MAX;
	return false;
}

static int64
interval_to_duration(const Interval *interval, const char *what, bool zero_ok)
{
	int64		duration;
	int64		end;
	bool		fits;

	if (idem_interval_is_infinite(interval))
		bad_duration(what, "It must be finite.");
	fits = idem_interval_duration(interval, &duration);
	if (duration < 0 || (duration == 0 && !zero_ok))
		bad_duration(what, zero_ok ? "It must not be negative." : "It must be greater than zero.");
	if (!fits || pg_add_s64_overflow(GetCurrentTimestamp(), duration, &end) ||
		end >= END_TIMESTAMP)
		bad_duration(what, "It ends after the last instant that type timestamptz can hold.");
	return duration;
}

/* Null gives 0, which no other valid value of a positive duration is. */
int64
idem_arg_duration(FunctionCallInfo fcinfo, int arg, const char *what, bool zero_ok)
{
	if (PG_ARGISNULL(arg))
		return 0;
	return interval_to_duration(PG_GETARG_INTERVAL_P(arg), what, zero_ok);
}

int64
idem_arg_ttl(FunctionCallInfo fcinfo, int arg)
{
	int64		ttl = idem_arg_duration(fcinfo, arg, "ttl", false);

	return ttl != 0 ? ttl : idem_default_ttl * USECS_PER_SEC;
}

int64
idem_arg_lease(FunctionCallInfo fcinfo, int arg)
{
	int64		lease = idem_arg_duration(fcinfo, arg, "lease", false);

	return lease != 0 ? lease : idem_default_lease * INT64CONST(1000);
}

int64
idem_arg_wait(FunctionCallInfo fcinfo, int arg)
{
	if (idem_interval_is_forever(PG_GETARG_INTERVAL_P(arg)))
		return IDEM_FOREVER;
	return interval_to_duration(PG_GETARG_INTERVAL_P(arg), "wait", true);
}

/*
 * from + duration.  A duration was checked when it came in; where it is added
 * to a later instant, such as a row's ttl to its completion, the last instant
 * that timestamptz can hold is late enough.
 */
TimestampTz
idem_later(TimestampTz from, int64 duration)
{
	int64		at;

	if (pg_add_s64_overflow(from, duration, &at) || at >= END_TIMESTAMP)
		return END_TIMESTAMP - 1;
	return at;
}

Datum
idem_make_interval(int64 duration)
{
	Interval   *interval = palloc0(sizeof(Interval));

	interval->time = duration;
	return IntervalPGetDatum(interval);
}

static void
bad_headers(void)
{
	ereport(ERROR,
			(errcode(IDEM_ERRCODE_BAD_INPUT),
			 errmsg("headers must be an array of [name, value] pairs of strings"),
			 errhint("Pass for example '[[\"Content-Type\",\"text/plain\"]]'.")));
}

static void
check_headers(Jsonb *headers)
{
	JsonbIterator *it = JsonbIteratorInit(&headers->root);
	JsonbValue	v;
	JsonbIteratorToken token;
	int			depth = 0;

	if (!JB_ROOT_IS_ARRAY(headers) || JB_ROOT_IS_SCALAR(headers))
		bad_headers();

	/* Arrays of two strings inside one array, and nothing else. */
	while ((token = JsonbIteratorNext(&it, &v, false)) != WJB_DONE)
	{
		switch (token)
		{
			case WJB_BEGIN_ARRAY:
				if (++depth > 2 || (depth == 2 && v.val.array.nElems != 2))
					bad_headers();
				break;
			case WJB_END_ARRAY:
				depth--;
				break;
			case WJB_ELEM:
				if (depth != 2 || v.type != jbvString)
					bad_headers();
				break;
			default:
				bad_headers();
		}
	}
}

/* Bytes of a varlena value as it is stored uncompressed, without its header. */
Size
idem_datum_size(NullableDatum value)
{
	return value.isnull ? 0 : toast_raw_datum_size(value.value) - VARHDRSZ;
}

bool
idem_size_is_allowed(Size size)
{
	return size <= (Size) idem_max_response_size;
}

void
idem_check_size(Size size, const char *what)
{
	if (!idem_size_is_allowed(size))
		ereport(ERROR,
				(errcode(IDEM_ERRCODE_TOO_LARGE),
				 errmsg("%s is too large", what),
				 errdetail("It has %zu bytes; setting \"idempotency.max_response_size\" allows %d.",
						   size, idem_max_response_size),
				 errhint("Store it elsewhere and keep a reference to it, or raise the setting.")));
}

void
idem_check_result(const IdemResult *result)
{
	if (!result->http_status.isnull)
	{
		int			status = DatumGetInt32(result->http_status.value);

		if (status < 100 || status > 599)
			ereport(ERROR,
					(errcode(IDEM_ERRCODE_BAD_INPUT),
					 errmsg("http_status %d is out of range", status),
					 errdetail("It must be between 100 and 599."),
					 errhint("Pass the status of the response, or null if there is none.")));
	}
	idem_check_size(idem_datum_size(result->headers) + idem_datum_size(result->response) +
					idem_datum_size(result->body), "result");
	if (!result->headers.isnull)
		check_headers(DatumGetJsonbP(result->headers.value));
}
