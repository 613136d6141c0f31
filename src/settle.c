/*-------------------------------------------------------------------------
 *
 * settle.c
 *	  What is done to a claim: complete, fail, renew, checkpoint; and to any
 *	  row, by an administrator: resolve, forget.
 *
 * They all go one way: take the key lock, look, see that the claim is there
 * and the caller's (find_row), decide, write.  If the row changed under the
 * decision, from the start again.  A transaction that is changing the row is
 * waited for, without the key lock, as an UPDATE would.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/timestamp.h"

#include "args.h"
#include "state.h"
#include "store.h"
#include "xact.h"

/* What a call may be applied to. */
typedef enum Access
{
	OWNERS_CLAIM,				/* a live row whose token the caller has */
	LIVE_ROW,
	ANY_ROW						/* or none */
} Access;

typedef struct Settlement
{
	IdemStore	store;
	Access		access;
	NullableDatum token;
	TimestampTz now;
	bool		own_claim;		/* open, and made in this transaction */
	IdemStatus	status;			/* of the row found */
	Datum	   *values;			/* the row found, to be changed */
	bool	   *nulls;
} Settlement;

static void
set_column(Settlement *s, IdemColumn column, Datum value)
{
	s->values[column - 1] = value;
	s->nulls[column - 1] = false;
}

static void
set_argument(Settlement *s, IdemColumn column, NullableDatum argument)
{
	s->values[column - 1] = argument.value;
	s->nulls[column - 1] = argument.isnull;
}

static void
set_null(Settlement *s, IdemColumn column)
{
	s->nulls[column - 1] = true;
}

static char *
key_name(const Settlement *s)
{
	return text_to_cstring(s->store.name.key);
}

static void
no_live_claim(const Settlement *s)
{
	ereport(ERROR,
			(errcode(IDEM_ERRCODE_NO_CLAIM),
			 errmsg("no live claim for idempotency key \"%s\"", key_name(s)),
			 errdetail("The key was never claimed in this scope, or it has expired or been deleted."),
			 errhint("Claim the key first, with a ttl and a lease that outlast the work.")));
}

static void
already_settled(const Settlement *s)
{
	ereport(ERROR,
			(errcode(IDEM_ERRCODE_SETTLED),
			 errmsg("idempotency key \"%s\" is already settled as \"%s\"", key_name(s),
					idem_status_name(s->status)),
			 errhint(s->status == IDEM_UNKNOWN
					 ? "Settle a key of unknown outcome with idem_resolve()."
					 : s->status == IDEM_RETRYABLE
					 ? "Claim the key again."
					 : "Read the stored result with idem_get(); it stays as it is.")));
}

static void
token_required(const IdemKey *name)
{
	ereport(ERROR,
			(errcode(IDEM_ERRCODE_LOST),
			 errmsg("a token is required for idempotency key \"%s\"", text_to_cstring(name->key)),
			 errdetail("Only completion and failure do without, in the transaction that made the claim."),
			 errhint("Pass the token that idem_claim() returned.")));
}

static void
check_token(const Settlement *s)
{
	if (s->token.isnull)
	{
		if (!idem_xact_is_own_claim(&s->store))
			token_required(&s->store.name);
		return;
	}
	if (DatumGetInt64(s->token.value) !=
		DatumGetInt64(idem_value(&s->store.current, IDEM_COL_TOKEN)))
		ereport(ERROR,
				(errcode(IDEM_ERRCODE_LOST),
				 errmsg("the claim on idempotency key \"%s\" was lost", key_name(s)),
				 errdetail("Token " INT64_FORMAT " is not the current one.",
						   DatumGetInt64(s->token.value)),
				 errhint("The key was taken over, resolved or claimed anew; do nothing more in its name.")));
}

static void
begin(Settlement *s, const char *function, IdemKey name, Access access)
{
	memset(s, 0, sizeof(*s));
	s->access = access;
	idem_require_writable(function);
	idem_open(&s->store, &name, RowExclusiveLock);
}

static void
begin_with_token(Settlement *s, const char *function, IdemKey name, NullableDatum token)
{
	begin(s, function, name, OWNERS_CLAIM);
	s->token = token;
}

/* Copies the row found; its varlenas stay in the pinned page. */
static void
load_row(Settlement *s)
{
	int			natts = RelationGetDescr(s->store.rel)->natts;
	TupleTableSlot *slot = s->store.current.slot;

	if (s->values == NULL)
	{
		s->values = palloc(natts * sizeof(Datum));
		s->nulls = palloc(natts * sizeof(bool));
	}
	memcpy(s->values, slot->tts_values, natts * sizeof(Datum));
	memcpy(s->nulls, slot->tts_isnull, natts * sizeof(bool));
	s->status = idem_status(&s->store, &s->store.current);
	s->own_claim = s->status == IDEM_PROCESSING && idem_xact_is_own_claim(&s->store);
}

/*
 * Finds the row, once nobody else is changing it; raises IK404 or IK410 where
 * the caller may not do this to it.  False if there is none and none needed.
 * Returns with the key lock held.
 */
static bool
find_row(Settlement *s)
{
	for (;;)
	{
		CHECK_FOR_INTERRUPTS();
		idem_lock_key(&s->store);
		idem_look(&s->store);
		s->now = GetCurrentTimestamp();
		if (s->access != ANY_ROW && !idem_is_live(&s->store.current, s->now))
			no_live_claim(s);
		if (!s->store.current.exists)
			return false;
		if (s->access == OWNERS_CLAIM)
			check_token(s);
		if (!TransactionIdIsValid(s->store.current.busy))
			break;
		idem_await_version(&s->store, &s->store.current);
	}
	load_row(s);
	return true;
}

/*
 * What became of a write; false if the row has to be found and decided on
 * again.  Another's row lock is waited for, without the key lock.
 */
static bool
is_written(Settlement *s, TM_Result result, LockTupleMode mode)
{
	if (result == TM_Ok)
		return true;
	if (result == TM_BeingModified)
		idem_await_row_lock(&s->store, mode);
	else
		idem_unlock_key(&s->store);
	return false;
}

static bool
write_row(Settlement *s)
{
	return is_written(s, idem_update(&s->store, s->values, s->nulls), LockTupleNoKeyExclusive);
}

/* Nothing to write after all. */
static Datum
finish(Settlement *s, Datum result)
{
	idem_close(&s->store);
	return result;
}

static void
set_result(Settlement *s, IdemStatus status, const IdemResult *result)
{
	set_column(s, IDEM_COL_STATUS, ObjectIdGetDatum(s->store.table->status[status]));
	set_column(s, IDEM_COL_COMPLETED_AT, TimestampTzGetDatum(s->now));
	set_null(s, IDEM_COL_LEASE_UNTIL);
	set_null(s, IDEM_COL_RETRY_AT);
	set_argument(s, IDEM_COL_HTTP_STATUS, result->http_status);
	set_argument(s, IDEM_COL_HEADERS, result->headers);
	set_argument(s, IDEM_COL_RESPONSE, result->response);
	set_argument(s, IDEM_COL_BODY, result->body);
}

/*
 * How long the settled row is kept: its ttl from now on, but not less than a
 * retry has to wait; a row of unknown outcome until it is resolved.
 */
static void
set_retention(Settlement *s, IdemStatus status, int64 ttl, TimestampTz retry_at)
{
	TimestampTz expires_at;

	if (ttl != 0)
		set_column(s, IDEM_COL_TTL, idem_make_interval(ttl));
	else
		ttl = idem_stored_ttl(&s->store.current);

	expires_at = idem_later(s->now, ttl);
	if (status == IDEM_UNKNOWN)
		expires_at = DT_NOEND;
	else if (expires_at <= retry_at)
		expires_at = idem_later(retry_at, ttl);
	set_column(s, IDEM_COL_EXPIRES_AT, TimestampTzGetDatum(expires_at));
}

static bool
same_jsonb(NullableDatum a, Datum b, bool b_isnull)
{
	if (a.isnull || b_isnull)
		return a.isnull == b_isnull;
	return compareJsonbContainers(&DatumGetJsonbP(a.value)->root,
								  &DatumGetJsonbP(b)->root) == 0;
}

static bool
same_result(const Settlement *s, const IdemResult *result)
{
	const IdemVersion *row = &s->store.current;
	bool		isnull = idem_isnull(row, IDEM_COL_HTTP_STATUS);

	if (result->http_status.isnull != isnull ||
		(!isnull && DatumGetInt32(result->http_status.value) !=
		 DatumGetInt32(idem_value(row, IDEM_COL_HTTP_STATUS))))
		return false;

	isnull = idem_isnull(row, IDEM_COL_BODY);
	if (result->body.isnull != isnull ||
		(!isnull && !idem_same_bytes(DatumGetByteaPP(result->body.value),
									 DatumGetByteaPP(idem_value(row, IDEM_COL_BODY)))))
		return false;

	return same_jsonb(result->headers, idem_value(row, IDEM_COL_HEADERS),
					  idem_isnull(row, IDEM_COL_HEADERS)) &&
		same_jsonb(result->response, idem_value(row, IDEM_COL_RESPONSE),
				   idem_isnull(row, IDEM_COL_RESPONSE));
}

/*
 * Settles an open claim.  False if it has been settled before in just this
 * way; IK409 if in another.
 */
static bool
settle(Settlement *s, IdemStatus status, const IdemResult *result, int64 ttl, int64 retry_after)
{
	do
	{
		TimestampTz retry_at = DT_NOBEGIN;

		(void) find_row(s);
		if (s->status != IDEM_PROCESSING)
		{
			if (s->status != status || !same_result(s, result))
				already_settled(s);
			return false;
		}
		set_result(s, status, result);
		if (status == IDEM_RETRYABLE)
		{
			retry_at = idem_later(s->now, retry_after);
			set_column(s, IDEM_COL_RETRY_AT, TimestampTzGetDatum(retry_at));
		}
		set_retention(s, status, ttl, retry_at);
	} while (!write_row(s));

	idem_xact_settled(s->own_claim);
	return true;
}

/* The arguments of a result; headers and body follow http_status. */
static IdemResult
arg_result(FunctionCallInfo fcinfo, int response, int http_status)
{
	IdemResult	result;

	result.response = fcinfo->args[response];
	result.http_status = fcinfo->args[http_status];
	result.headers = fcinfo->args[http_status + 1];
	result.body = fcinfo->args[http_status + 2];
	idem_check_result(&result);
	return result;
}

/*
 * idem_complete(key text, response jsonb, token bigint, scope text,
 *				 http_status int, headers jsonb, body bytea, ttl interval) -> boolean
 *
 * Stores the result.  True, or false if the claim was completed before with
 * the same token and the same result.
 *
 * Errors: IK400, IK404, IK409, IK410, IK413, 25006, 42501.
 */
PG_FUNCTION_INFO_V1(idem_complete);
Datum
idem_complete(PG_FUNCTION_ARGS)
{
	Settlement	s;
	IdemKey		name = idem_arg_key(fcinfo, 0, 3);
	IdemResult	result;
	int64		ttl;

	result = arg_result(fcinfo, 1, 4);
	ttl = idem_arg_duration(fcinfo, 7, "ttl", false);

	begin_with_token(&s, "idem_complete()", name, fcinfo->args[2]);
	PG_RETURN_DATUM(finish(&s, BoolGetDatum(settle(&s, IDEM_COMPLETED, &result, ttl, 0))));
}

static IdemDisposition
disposition_of(const IdemStore *store, Oid value)
{
	for (int i = 0; i < IDEM_NDISPOSITION; i++)
		if (store->table->disposition[i] == value)
			return (IdemDisposition) i;
	elog(ERROR, "unexpected value %u of enum idem_disposition", value);
}

/*
 * idem_fail(key text, error jsonb, token bigint, scope text,
 *			 disposition idem_disposition, retry_after interval,
 *			 http_status int, headers jsonb, body bytea, ttl interval) -> boolean
 *
 * Ends the claim without success: final = stored and replayed like a success;
 * retry = the next claim gets it, not before retry_after (which counts with
 * retry alone); unknown = held until idem_resolve.  Returns as idem_complete.
 *
 * Errors: IK400, IK404, IK409, IK410, IK413, 25006, 42501.
 */
PG_FUNCTION_INFO_V1(idem_fail);
Datum
idem_fail(PG_FUNCTION_ARGS)
{
	static const IdemStatus ends_as[IDEM_NDISPOSITION] =
	{IDEM_FAILED, IDEM_RETRYABLE, IDEM_UNKNOWN};

	Settlement	s;
	IdemKey		name = idem_arg_key(fcinfo, 0, 3);
	IdemResult	result;
	int64		ttl;
	int64		retry_after;
	IdemDisposition disposition;

	if (PG_ARGISNULL(4))
		ereport(ERROR,
				(errcode(IDEM_ERRCODE_BAD_INPUT),
				 errmsg("disposition must not be null"),
				 errhint("Pass 'final', 'retry' or 'unknown'.")));
	result = arg_result(fcinfo, 1, 6);
	retry_after = idem_arg_duration(fcinfo, 5, "retry_after", true);
	ttl = idem_arg_duration(fcinfo, 9, "ttl", false);

	begin_with_token(&s, "idem_fail()", name, fcinfo->args[2]);
	disposition = disposition_of(&s.store, PG_GETARG_OID(4));
	PG_RETURN_DATUM(finish(&s, BoolGetDatum(settle(&s, ends_as[disposition], &result, ttl,
												   retry_after))));
}

/* A call that works on an open claim, and always needs its token. */
static void
find_open_claim(Settlement *s)
{
	(void) find_row(s);
	if (s->status != IDEM_PROCESSING)
		already_settled(s);
}

static NullableDatum
arg_token(FunctionCallInfo fcinfo, int arg, const IdemKey *name)
{
	if (PG_ARGISNULL(arg))
		token_required(name);
	return fcinfo->args[arg];
}

/* The row lives as long as its lease at least. */
static void
set_lease(Settlement *s, TimestampTz lease_until)
{
	const IdemVersion *row = &s->store.current;
	TimestampTz expires_at = idem_later(idem_instant(row, IDEM_COL_CLAIMED_AT),
										idem_stored_ttl(row));

	set_column(s, IDEM_COL_LEASE_UNTIL, TimestampTzGetDatum(lease_until));
	if (DatumGetBool(idem_value(row, IDEM_COL_TAKEOVER)))
		set_column(s, IDEM_COL_EXPIRES_AT, TimestampTzGetDatum(Max(expires_at, lease_until)));
}

static Datum
finish_change(Settlement *s)
{
	Datum		lease_until = s->values[IDEM_COL_LEASE_UNTIL - 1];

	if (!s->own_claim)
		idem_xact_changed();
	return finish(s, lease_until);
}

/*
 * idem_renew(key text, token bigint, lease interval, scope text) -> timestamptz
 *
 * Sets the end of the lease to lease from now, and returns it.  Without lease
 * it is idempotency.default_lease from now, but never earlier than it was.
 *
 * Errors: IK400, IK404, IK409 once settled, IK410, 25006, 42501.
 */
PG_FUNCTION_INFO_V1(idem_renew);
Datum
idem_renew(PG_FUNCTION_ARGS)
{
	Settlement	s;
	IdemKey		name = idem_arg_key(fcinfo, 0, 3);
	int64		lease = idem_arg_lease(fcinfo, 2);
	bool		extend_only = PG_ARGISNULL(2);

	begin_with_token(&s, "idem_renew()", name, arg_token(fcinfo, 1, &name));
	do
	{
		TimestampTz lease_until;

		find_open_claim(&s);
		lease_until = idem_later(s.now, lease);
		if (extend_only)
			lease_until = Max(lease_until, idem_instant(&s.store.current, IDEM_COL_LEASE_UNTIL));
		set_lease(&s, lease_until);
	} while (!write_row(&s));
	PG_RETURN_DATUM(finish_change(&s));
}

/*
 * idem_checkpoint(key text, token bigint, checkpoint text, state jsonb,
 *				   scope text, lease interval) -> timestamptz
 *
 * Notes how far the work has got, for whoever takes over: replaces checkpoint
 * and state, and with lease renews too.  Returns the end of the lease.
 *
 * Errors: IK400, IK404, IK409 once settled, IK410, IK413, 25006, 42501.
 */
PG_FUNCTION_INFO_V1(idem_checkpoint);
Datum
idem_checkpoint(PG_FUNCTION_ARGS)
{
	Settlement	s;
	IdemKey		name = idem_arg_key(fcinfo, 0, 4);
	NullableDatum checkpoint = fcinfo->args[2];
	NullableDatum state = fcinfo->args[3];
	int64		lease = idem_arg_duration(fcinfo, 5, "lease", false);

	if (checkpoint.isnull)
		ereport(ERROR,
				(errcode(IDEM_ERRCODE_BAD_INPUT),
				 errmsg("checkpoint must not be null"),
				 errhint("Name the step that has been reached.")));
	idem_check_size(idem_datum_size(checkpoint) + idem_datum_size(state), "checkpoint");

	begin_with_token(&s, "idem_checkpoint()", name, arg_token(fcinfo, 1, &name));
	do
	{
		find_open_claim(&s);
		set_argument(&s, IDEM_COL_CHECKPOINT, checkpoint);
		set_argument(&s, IDEM_COL_STATE, state);
		if (lease != 0)
			set_lease(&s, idem_later(s.now, lease));
	} while (!write_row(&s));
	PG_RETURN_DATUM(finish_change(&s));
}

static IdemStatus
arg_resolution(Settlement *s, FunctionCallInfo fcinfo, int arg)
{
	IdemStatus	status = IDEM_PROCESSING;

	if (!PG_ARGISNULL(arg))
		status = idem_status_of(s->store.table, PG_GETARG_OID(arg));
	if (status == IDEM_PROCESSING || status == IDEM_UNKNOWN)
		ereport(ERROR,
				(errcode(IDEM_ERRCODE_BAD_INPUT),
				 errmsg("a key can only be resolved as completed, failed or retryable"),
				 errhint("Pass one of these as the status.")));
	return status;
}

static void
log_resolution(const Settlement *s, const char *status, NullableDatum note)
{
	ereport(LOG,
			(errmsg("idempotency key \"%s\" in scope \"%s\" was resolved as %s by \"%s\"",
					key_name(s), text_to_cstring(s->store.name.scope), status,
					GetUserNameFromId(GetUserId(), false)),
			 note.isnull ? 0 : errdetail("Note: %s", TextDatumGetCString(note.value))));
}

/*
 * idem_resolve(key text, status idem_status, response jsonb, scope text,
 *				note text) -> boolean
 *
 * For an administrator who knows how it ended: settles a row that is not
 * finally settled, without its token, and gives it a new one, so that its
 * owner is fenced off.  Who did it and the note go to the row and the server
 * log.  False if it stands settled in just this way already.
 *
 * Errors: IK400, IK404, IK409, IK413, 25006, 42501.
 */
PG_FUNCTION_INFO_V1(idem_resolve);
Datum
idem_resolve(PG_FUNCTION_ARGS)
{
	Settlement	s;
	IdemKey		name = idem_arg_key(fcinfo, 0, 3);
	IdemResult	result = {{0, true}, {0, true}, {0, true}, {0, true}};
	NullableDatum note = fcinfo->args[4];
	IdemStatus	status;

	result.response = fcinfo->args[2];
	idem_check_result(&result);
	idem_check_size(idem_datum_size(note), "note");

	begin(&s, "idem_resolve()", name, LIVE_ROW);
	status = arg_resolution(&s, fcinfo, 1);
	do
	{
		(void) find_row(&s);
		if (s.status == status && same_result(&s, &result) &&
			idem_instant(&s.store.current, IDEM_COL_RETRY_AT) <= s.now)
			PG_RETURN_DATUM(finish(&s, BoolGetDatum(false)));
		if (s.status == IDEM_COMPLETED || s.status == IDEM_FAILED)
			already_settled(&s);
		set_result(&s, status, &result);
		set_retention(&s, status, 0, DT_NOBEGIN);
		set_column(&s, IDEM_COL_TOKEN, Int64GetDatum(idem_next_token(&s.store)));
		set_column(&s, IDEM_COL_RESOLVED_BY,
				   CStringGetTextDatum(GetUserNameFromId(GetUserId(), false)));
		set_argument(&s, IDEM_COL_NOTE, note);
	} while (!write_row(&s));

	idem_xact_settled(s.own_claim);
	log_resolution(&s, idem_status_name(status), note);
	PG_RETURN_DATUM(finish(&s, BoolGetDatum(true)));
}

/*
 * idem_forget(key text, scope text) -> boolean
 *
 * Deletes the row, whatever its state, so that the key can be claimed anew; a
 * claim that is open is lost to its owner (IK404).  False if there was none.
 *
 * Errors: IK400, 25006, 42501.
 */
PG_FUNCTION_INFO_V1(idem_forget);
Datum
idem_forget(PG_FUNCTION_ARGS)
{
	Settlement	s;
	IdemKey		name = idem_arg_key(fcinfo, 0, 1);

	begin(&s, "idem_forget()", name, ANY_ROW);
	do
	{
		if (!find_row(&s))
			PG_RETURN_DATUM(finish(&s, BoolGetDatum(false)));
	} while (!is_written(&s, idem_delete(&s.store), LockTupleExclusive));
	idem_xact_settled(s.own_claim);
	PG_RETURN_DATUM(finish(&s, BoolGetDatum(true)));
}
