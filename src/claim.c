/*-------------------------------------------------------------------------
 *
 * claim.c
 *	  idem_claim: one caller gets the key, everyone else gets the answer.
 *
 * Judge first, without a lock (judge.c); most calls end there, having written
 * nothing.  Only a claim that would write takes the key lock, judges again
 * what it now sees, and writes.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "common/int.h"
#include "fmgr.h"
#include "funcapi.h"
#include "utils/timestamp.h"

#include "args.h"
#include "claim.h"
#include "fingerprint.h"
#include "state.h"
#include "stats.h"
#include "wait.h"
#include "waiters.h"
#include "xact.h"

#define SET(column, value) \
	(values[(column) - 1] = (value), nulls[(column) - 1] = false)
#define SET_NULL(column) (nulls[(column) - 1] = true)

/* What begins with the first attempt and lasts through all of them. */
static void
fill_key(IdemStore *store, const IdemRequest *request, IdemJudgement *j,
		 Datum *values, bool *nulls)
{
	if (j->action == IDEM_INSERT)
	{
		SET(IDEM_COL_SCOPE, PointerGetDatum(store->name.scope));
		SET(IDEM_COL_KEY, PointerGetDatum(store->name.key));
	}
	SET(IDEM_COL_CREATED_AT, TimestampTzGetDatum(j->now));
	SET(IDEM_COL_OPERATION, PointerGetDatum(request->operation));
	SET(IDEM_COL_ATTEMPT, Int32GetDatum(1));
	SET_NULL(IDEM_COL_REQUEST_HASH);
	SET_NULL(IDEM_COL_CHECKPOINT);
	SET_NULL(IDEM_COL_STATE);
}

/* A take-over goes on with what the last attempt has left. */
static void
count_attempt(Datum *values)
{
	int32		attempt = DatumGetInt32(values[IDEM_COL_ATTEMPT - 1]);

	if (!pg_add_s32_overflow(attempt, 1, &attempt))
		values[IDEM_COL_ATTEMPT - 1] = Int32GetDatum(attempt);
}

/* How the claim stands: open, or with once settled from the start. */
static void
fill_status(IdemStore *store, const IdemRequest *request, IdemJudgement *j,
			Datum *values, bool *nulls)
{
	IdemStatus	status = request->once ? IDEM_COMPLETED : IDEM_PROCESSING;
	TimestampTz expires_at = idem_later(j->now, request->ttl);
	TimestampTz due_at = idem_due(expires_at);

	/* A take-over can be a heap-only update as well. */
	if (j->action == IDEM_TAKE_OVER)
		due_at = idem_due_still(DatumGetTimestampTz(values[IDEM_COL_DUE_AT - 1]), expires_at);

	SET(IDEM_COL_STATUS, ObjectIdGetDatum(store->table->status[status]));
	if (request->once)
	{
		SET(IDEM_COL_COMPLETED_AT, TimestampTzGetDatum(j->now));
		SET_NULL(IDEM_COL_LEASE_UNTIL);
	}
	else
	{
		TimestampTz lease_until = idem_later(j->now, request->lease);

		SET_NULL(IDEM_COL_COMPLETED_AT);
		SET(IDEM_COL_LEASE_UNTIL, TimestampTzGetDatum(lease_until));
		if (request->takeover)
			expires_at = Max(expires_at, lease_until);
		else
			expires_at = due_at = DT_NOEND;
	}
	SET(IDEM_COL_EXPIRES_AT, TimestampTzGetDatum(expires_at));
	SET(IDEM_COL_DUE_AT, TimestampTzGetDatum(due_at));
}

/* The columns of a new claim; for a take-over, over those of the last one. */
static void
fill_claim(IdemStore *store, const IdemRequest *request, IdemJudgement *j,
		   Datum *values, bool *nulls)
{
	if (j->action == IDEM_TAKE_OVER)
		count_attempt(values);
	else
		fill_key(store, request, j, values, nulls);
	fill_status(store, request, j, values, nulls);

	SET(IDEM_COL_CLAIMED_AT, TimestampTzGetDatum(j->now));
	SET(IDEM_COL_TOKEN, Int64GetDatum(idem_next_token(store)));
	SET(IDEM_COL_TTL, idem_make_interval(request->ttl));
	SET(IDEM_COL_TAKEOVER, BoolGetDatum(request->takeover));
	if (request->hash != NULL)
		SET(IDEM_COL_REQUEST_HASH, PointerGetDatum(request->hash));
	SET_NULL(IDEM_COL_RETRY_AT);
	SET_NULL(IDEM_COL_HTTP_STATUS);
	SET_NULL(IDEM_COL_HEADERS);
	SET_NULL(IDEM_COL_RESPONSE);
	SET_NULL(IDEM_COL_BODY);
	SET_NULL(IDEM_COL_RESOLVED_BY);
	SET_NULL(IDEM_COL_NOTE);
}

/*
 * Writes the claim over the current row; its row is reserved first, so that no
 * token is drawn for nothing.
 */
static TM_Result
claim_row(IdemStore *store, const IdemRequest *request, IdemJudgement *j,
		  Datum *values, bool *nulls)
{
	int			natts = RelationGetDescr(store->rel)->natts;
	TM_Result	result = idem_reserve_row(store, LockTupleNoKeyExclusive);

	if (result != TM_Ok)
		return result;
	memcpy(values, store->current.slot->tts_values, natts * sizeof(Datum));
	memcpy(nulls, store->current.slot->tts_isnull, natts * sizeof(bool));
	fill_claim(store, request, j, values, nulls);
	return idem_update(store, values, nulls, j->action == IDEM_RESTART);
}

/* The row that goes with an answer which found it. */
static void
answer_with_subject(IdemAnswer *a)
{
	TupleTableSlot *slot = a->j.subject != NULL ? a->j.subject->slot : NULL;

	a->values = slot != NULL ? slot->tts_values : NULL;
	a->nulls = slot != NULL ? slot->tts_isnull : NULL;
}

/* Answers, if there is nothing to write for it. */
bool
idem_answer_at_once(IdemStore *store, const IdemRequest *request, IdemAnswer *a)
{
	a->writes = idem_writes_to_slot(idem_key_hash(store));
	idem_look(store);
	idem_judge(store, request, &a->j);
	if (a->j.action != IDEM_ANSWER && !idem_is_writable())
	{
		/* Be sure before we refuse what might only be a replay. */
		idem_look_again(store);
		idem_judge(store, request, &a->j);
	}
	answer_with_subject(a);
	return a->j.action == IDEM_ANSWER;
}

/*
 * Did the key expire less than its ttl ago?  Then a caller may still have
 * counted on it, and the ttl is too short.
 */
static bool
reused_early(IdemStore *store, TimestampTz now)
{
	return now - idem_instant(&store->current, IDEM_COL_EXPIRES_AT) <
		idem_stored_ttl(&store->current);
}

static void
count_claim(IdemStore *store, const IdemRequest *request, const IdemJudgement *j)
{
	idem_count(request->once ? IDEM_COUNT_ONCE_FIRST : IDEM_COUNT_CLAIMS);
	if (j->action == IDEM_TAKE_OVER)
		idem_count(IDEM_COUNT_TAKEOVERS);
	else if (j->action == IDEM_RESTART && reused_early(store, j->now))
		idem_count(IDEM_COUNT_REUSED);
}

/* What a call, or one key of it, was told in the end; idem_take() counts claims. */
void
idem_count_answer(const IdemRequest *request, const IdemAnswer *a)
{
	switch (a->j.outcome)
	{
		case IDEM_OUT_COMPLETED:
		case IDEM_OUT_FAILED:
			idem_count(request->once ? IDEM_COUNT_ONCE_AGAIN : IDEM_COUNT_REPLAYS);
			break;
		case IDEM_OUT_PROCESSING:
			idem_count(IDEM_COUNT_PROCESSING);
			break;
		case IDEM_OUT_MISMATCH:
			idem_count(IDEM_COUNT_MISMATCHES);
			break;
		default:
			break;
	}
}

/*
 * The key was absent, and nobody who locks keys has written it since.  (If
 * somebody else has, the insert notices.)
 */
static bool
is_still_absent(IdemStore *store, const IdemAnswer *a)
{
	return a->j.action == IDEM_INSERT && a->writes != 0 &&
		a->writes == idem_writes_to_slot(idem_key_hash(store));
}

/*
 * Takes the key, if it can still be had, under the key lock.  The answer comes
 * in as idem_answer_at_once() left it; CLAIMED comes back with the new row.
 */
void
idem_take(IdemStore *store, const IdemRequest *request, IdemAnswer *a)
{
	int			natts = RelationGetDescr(store->rel)->natts;
	Datum	   *values = palloc(natts * sizeof(Datum));
	bool	   *nulls = palloc(natts * sizeof(bool));
	IdemJudgement *j = &a->j;
	bool		look;

	idem_lock_key(store);
	for (look = !is_still_absent(store, a);; look = true)
	{
		TM_Result	result;

		if (look)
		{
			idem_look(store);
			idem_judge(store, request, j);
			if (j->action == IDEM_ANSWER)
				break;
		}

		if (j->action == IDEM_INSERT)
		{
			fill_claim(store, request, j, values, nulls);
			result = idem_insert(store, values, nulls) ? TM_Ok : TM_Updated;
		}
		else
			result = claim_row(store, request, j, values, nulls);

		if (result == TM_Ok)
		{
			if (!request->once)
				idem_xact_claimed(store, DatumGetInt64(values[IDEM_COL_TOKEN - 1]));
			count_claim(store, request, j);
			idem_answer(j, IDEM_OUT_CLAIMED, NULL);
			break;
		}
		if (result == TM_BeingModified)
		{
			idem_answer_locked(store, j);
			break;
		}
	}
	idem_unlock_key(store);

	if (j->outcome == IDEM_OUT_CLAIMED)
	{
		a->values = values;
		a->nulls = nulls;
		return;
	}
	answer_with_subject(a);
	pfree(values);
	pfree(nulls);
}

/* What keeps the key from being claimed now. */
static IdemObstacle
obstacle(IdemStore *store, const IdemJudgement *j)
{
	IdemObstacle o = {0};

	o.key = idem_key_hash(store);
	o.brief = j->vanishing;
	o.lease_until = j->lease_until;
	if (store->pending.exists)
		o.xid = store->pending.busy;
	else if (store->current.exists)
		o.xid = store->current.busy;
	return o;
}

/* One try.  Leaves the store open. */
static void
claim_once(IdemStore *store, const IdemKey *name, const IdemRequest *request,
		   const char *function, IdemAnswer *a)
{
	idem_open(store, name, AccessShareLock);
	if (idem_answer_at_once(store, request, a))
		return;
	idem_close(store);
	idem_require_writable(function);
	idem_open(store, name, RowExclusiveLock);
	idem_take(store, request, a);
}

/*
 * Claims the key, and as long as somebody else is at it, waits for up to
 * duration microseconds.  Leaves the store open.
 */
void
idem_claim_waiting(IdemStore *store, const IdemKey *name, const IdemRequest *request,
				   int64 duration, const char *function, IdemAnswer *a)
{
	IdemWait	wait;

	idem_wait_begin(&wait, duration);
	for (;;)
	{
		IdemObstacle o;
		bool		stand_in_line;

		claim_once(store, name, request, function, a);
		if (a->j.outcome != IDEM_OUT_PROCESSING || a->j.own ||
			idem_wait_is_over(&wait, a->j.vanishing))
			break;
		o = obstacle(store, &a->j);
		stand_in_line = a->j.row_locked && duration == IDEM_FOREVER;
		if (stand_in_line)
			idem_await_row_lock(store, LockTupleNoKeyExclusive);
		idem_close(store);
		if (!stand_in_line)
			idem_wait_pause(&wait, &o);
	}
	idem_wait_end();
	idem_count_answer(request, a);
}

/*
 * idem_claim(key text, request jsonb, scope text, operation text,
 *			  request_hash bytea, ttl interval, lease interval, wait interval,
 *			  takeover boolean) -> one row
 *
 * Claims the key for the caller, or tells how it stands: see idem_judge() for
 * the order of the outcomes.  request_hash, where given, stands for the
 * request's fingerprint.  wait: how long to wait at most while the key is
 * processing.
 *
 * Errors: IK400 for a bad argument; 42501 for a scope that isn't the role's;
 * 25006 when the key would have to be claimed in a read-only transaction or
 * on a standby.
 *
 * The outcomes follow Stripe's idempotent requests (a replay returns the first
 * result, success or not; other parameters are refused) and the IETF
 * Idempotency-Key draft (409 while processing, 422 for another request).
 */
PG_FUNCTION_INFO_V1(idem_claim);
Datum
idem_claim(PG_FUNCTION_ARGS)
{
	IdemKey		name = idem_arg_key(fcinfo, 0, 2);
	IdemRequest request = {0};
	IdemStore	store;
	IdemAnswer	answer;
	Datum		values[IDEM_NCLAIM];
	bool		nulls[IDEM_NCLAIM];
	int64		wait;
	Datum		result;

	request.operation = idem_arg_name(fcinfo, 3, "operation");
	request.hash = idem_arg_hash(fcinfo, 4);
	request.ttl = idem_arg_ttl(fcinfo, 5);
	request.lease = idem_arg_lease(fcinfo, 6);
	if (PG_ARGISNULL(7))
		idem_bad_null("wait", "Pass '0' for an answer at once.");
	wait = idem_arg_wait(fcinfo, 7);
	request.takeover = idem_arg_bool(fcinfo, 8, "takeover");
	if (request.hash == NULL && !PG_ARGISNULL(1))
		request.hash = idem_fingerprint_of(PG_GETARG_JSONB_P(1), NULL);

	idem_claim_waiting(&store, &name, &request, wait, "idem_claim()", &answer);
	idem_check_result_type(fcinfo, store.table->claim_desc);
	idem_answer_columns(&store, &answer, values, nulls);
	result = HeapTupleGetDatum(heap_form_tuple(store.table->claim_desc, values, nulls));
	idem_close(&store);
	PG_RETURN_DATUM(result);
}
