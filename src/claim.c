/*-------------------------------------------------------------------------
 *
 * claim.c
 *	  idem_claim: one caller gets the key, everyone else gets the answer.
 *
 * Judge first, without a lock; most calls end there, having written nothing.
 * Only a claim that would write takes the key lock, judges again what it now
 * sees, and writes.  judge() has the order of the outcomes that the contract
 * gives; the writing adds "claimed", and "processing" for a row that is locked.
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
#include "fingerprint.h"
#include "state.h"
#include "wait.h"
#include "xact.h"

/* What is suggested at least, where nothing is known about how long it takes. */
#define SHORTEST_RETRY	USECS_PER_SEC
#define LONGEST_RETRY	(60 * USECS_PER_SEC)
#define VANISHING_RETRY	(USECS_PER_SEC / 10)

typedef struct ClaimRequest
{
	IdemKey		name;
	text	   *operation;
	bytea	   *hash;			/* NULL: don't compare */
	int64		ttl;
	int64		lease;
	bool		takeover;
} ClaimRequest;

typedef enum ClaimAction
{
	CLAIM_ANSWER,				/* nothing to write */
	CLAIM_INSERT,				/* the key is absent */
	CLAIM_RESTART,				/* its row has expired */
	CLAIM_TAKE_OVER				/* the last attempt has ended */
} ClaimAction;

typedef struct Judgement
{
	ClaimAction action;
	IdemOutcome outcome;		/* with CLAIM_ANSWER */
	IdemVersion *subject;		/* the version it is about, if any */
	bool		own;			/* this very transaction holds the key */
	bool		vanishing;		/* look again soon: a row is locked, or going */
	int64		retry_after;	/* microseconds; 0: not said */
	TimestampTz lease_until;	/* with IDEM_OUT_PROCESSING */
	TimestampTz now;
} Judgement;

/*
 * Is this the request the row was claimed for?  A request that wasn't given,
 * then or now, is not compared.
 */
static bool
same_request(const IdemVersion *version, const ClaimRequest *request)
{
	if (!idem_same_bytes(DatumGetTextPP(idem_value(version, IDEM_COL_OPERATION)),
						 request->operation))
		return false;
	if (request->hash == NULL || idem_isnull(version, IDEM_COL_REQUEST_HASH))
		return true;
	return idem_same_bytes(DatumGetByteaPP(idem_value(version, IDEM_COL_REQUEST_HASH)),
						   request->hash);
}

static void
answer(Judgement *j, IdemOutcome outcome, IdemVersion *subject)
{
	j->action = CLAIM_ANSWER;
	j->outcome = outcome;
	j->subject = subject;
}

/*
 * When to ask again: as long again as the owner has been at it, within bounds,
 * and never past the lease.
 */
static void
answer_processing(Judgement *j, IdemVersion *subject)
{
	TimestampTz claimed_at = idem_instant(subject, IDEM_COL_CLAIMED_AT);
	int64		hint = Max(SHORTEST_RETRY, Min(LONGEST_RETRY, j->now - claimed_at));

	answer(j, IDEM_OUT_PROCESSING, subject);
	j->lease_until = idem_instant(subject, IDEM_COL_LEASE_UNTIL);
	if (j->lease_until > j->now)
		hint = Min(hint, j->lease_until - j->now);
	else if (j->lease_until > claimed_at)
		hint = Min(hint, j->lease_until - claimed_at);	/* over, yet not committed */
	j->retry_after = hint;
}

static void
answer_retryable(Judgement *j, IdemVersion *subject)
{
	answer(j, IDEM_OUT_RETRYABLE, subject);
	j->retry_after = idem_instant(subject, IDEM_COL_RETRY_AT) - j->now;
}

/* The row is there, expired, and about to be gone, or locked to be deleted. */
static void
answer_vanishing(Judgement *j)
{
	answer(j, IDEM_OUT_PROCESSING, NULL);
	j->vanishing = true;
	j->lease_until = DT_NOBEGIN;
	j->retry_after = VANISHING_RETRY;
}

static bool
is_backing_off(IdemStore *store, const IdemVersion *row, TimestampTz now)
{
	return idem_status(store, row) == IDEM_RETRYABLE &&
		idem_instant(row, IDEM_COL_RETRY_AT) > now;
}

/*
 * A transaction that has not ended is changing the key.  If it has claimed it,
 * the answer is about that claim, but not for longer than a running lease.
 */
static void
judge_unfinished(IdemStore *store, Judgement *j, bool live)
{
	IdemVersion *pending = &store->pending;

	if (pending->exists && idem_status(store, pending) == IDEM_PROCESSING)
	{
		answer_processing(j, pending);
		if (live && idem_instant(&store->current, IDEM_COL_LEASE_UNTIL) > j->now)
			j->retry_after = Min(j->retry_after,
								 idem_instant(&store->current, IDEM_COL_LEASE_UNTIL) - j->now);
	}
	else if (live && is_backing_off(store, &store->current, j->now))
		answer_retryable(j, &store->current);
	else if (live)
		answer_processing(j, &store->current);
	else if (pending->exists)
		answer_processing(j, pending);
	else
		answer_vanishing(j);
}

static void
judge_live(IdemStore *store, Judgement *j)
{
	IdemVersion *row = &store->current;

	switch (idem_status_at(store, row, j->now))
	{
		case IDEM_PROCESSING:
			j->own = row->own;
			if (row->own || idem_instant(row, IDEM_COL_LEASE_UNTIL) > j->now)
				answer_processing(j, row);
			else
				j->action = CLAIM_TAKE_OVER;
			break;
		case IDEM_RETRYABLE:
			if (is_backing_off(store, row, j->now))
				answer_retryable(j, row);
			else
				j->action = CLAIM_TAKE_OVER;
			break;
		case IDEM_COMPLETED:
			answer(j, IDEM_OUT_COMPLETED, row);
			break;
		case IDEM_FAILED:
			answer(j, IDEM_OUT_FAILED, row);
			break;
		default:
			answer(j, IDEM_OUT_UNKNOWN, row);
	}
}

static bool
is_settled(IdemStatus status)
{
	return status == IDEM_COMPLETED || status == IDEM_FAILED || status == IDEM_UNKNOWN;
}

/* The contract's order: mismatch, settled, unknown, processing, retryable, claimed. */
static void
judge(IdemStore *store, const ClaimRequest *request, Judgement *j)
{
	IdemVersion *current = &store->current;
	IdemVersion *newest;
	bool		live;
	bool		unfinished;
	bool		settled;

	memset(j, 0, sizeof(*j));
	j->now = GetCurrentTimestamp();
	live = idem_is_live(current, j->now);

	unfinished = store->pending.exists ||
		(current->exists && TransactionIdIsValid(current->busy));
	settled = live && is_settled(idem_status_at(store, current, j->now));

	newest = idem_is_live(&store->pending, j->now) ? &store->pending : live ? current : NULL;
	if (newest != NULL && !same_request(newest, request))
		answer(j, IDEM_OUT_MISMATCH, NULL);
	else if (unfinished && !settled)
		judge_unfinished(store, j, live);
	else if (live)
		judge_live(store, j);
	else
		j->action = current->exists ? CLAIM_RESTART : CLAIM_INSERT;
}

/* The columns of a new claim; for a take-over, over those of the last one. */
static void
fill_claim(IdemStore *store, const ClaimRequest *request, Judgement *j,
		   Datum *values, bool *nulls)
{
	TimestampTz lease_until = idem_later(j->now, request->lease);
	TimestampTz expires_at = Max(lease_until, idem_later(j->now, request->ttl));
	int32		attempt = 1;

#define SET(column, value) \
	(values[(column) - 1] = (value), nulls[(column) - 1] = false)
#define SET_NULL(column) (nulls[(column) - 1] = true)

	if (j->action == CLAIM_TAKE_OVER)
	{
		int32		last = DatumGetInt32(values[IDEM_COL_ATTEMPT - 1]);

		if (pg_add_s32_overflow(last, 1, &attempt))
			attempt = last;
	}
	else
	{
		if (j->action == CLAIM_INSERT)
		{
			SET(IDEM_COL_SCOPE, PointerGetDatum(store->name.scope));
			SET(IDEM_COL_KEY, PointerGetDatum(store->name.key));
		}
		SET(IDEM_COL_CREATED_AT, TimestampTzGetDatum(j->now));
		SET(IDEM_COL_OPERATION, PointerGetDatum(request->operation));
		SET_NULL(IDEM_COL_REQUEST_HASH);
		SET_NULL(IDEM_COL_CHECKPOINT);
		SET_NULL(IDEM_COL_STATE);
	}

	SET(IDEM_COL_CLAIMED_AT, TimestampTzGetDatum(j->now));
	SET(IDEM_COL_EXPIRES_AT, TimestampTzGetDatum(request->takeover ? expires_at : DT_NOEND));
	SET(IDEM_COL_TOKEN, Int64GetDatum(idem_next_token(store)));
	SET(IDEM_COL_TTL, idem_make_interval(request->ttl));
	SET(IDEM_COL_ATTEMPT, Int32GetDatum(attempt));
	SET(IDEM_COL_STATUS, ObjectIdGetDatum(store->table->status[IDEM_PROCESSING]));
	SET(IDEM_COL_TAKEOVER, BoolGetDatum(request->takeover));
	if (request->hash != NULL)
		SET(IDEM_COL_REQUEST_HASH, PointerGetDatum(request->hash));
	SET(IDEM_COL_LEASE_UNTIL, TimestampTzGetDatum(lease_until));
	SET_NULL(IDEM_COL_COMPLETED_AT);
	SET_NULL(IDEM_COL_RETRY_AT);
	SET_NULL(IDEM_COL_HTTP_STATUS);
	SET_NULL(IDEM_COL_HEADERS);
	SET_NULL(IDEM_COL_RESPONSE);
	SET_NULL(IDEM_COL_BODY);
	SET_NULL(IDEM_COL_RESOLVED_BY);
	SET_NULL(IDEM_COL_NOTE);
#undef SET
#undef SET_NULL
}

/*
 * Writes the claim over the current row; its row is reserved first, so that no
 * token is drawn for nothing.
 */
static TM_Result
claim_row(IdemStore *store, const ClaimRequest *request, Judgement *j,
		  Datum *values, bool *nulls)
{
	int			natts = RelationGetDescr(store->rel)->natts;
	TM_Result	result = idem_reserve_row(store, LockTupleNoKeyExclusive);

	if (result != TM_Ok)
		return result;
	memcpy(values, store->current.slot->tts_values, natts * sizeof(Datum));
	memcpy(nulls, store->current.slot->tts_isnull, natts * sizeof(bool));
	fill_claim(store, request, j, values, nulls);
	return idem_update(store, values, nulls);
}

/*
 * Somebody holds a lock on the row, as a sweep does that is about to delete
 * it; soon it will be known.
 */
static void
answer_locked(IdemStore *store, Judgement *j)
{
	if (idem_is_live(&store->current, j->now))
		answer_processing(j, &store->current);
	else
		answer_vanishing(j);
	j->vanishing = true;
}

/*
 * Takes the key, if it can still be had, under the key lock.  The judgement
 * that comes back is an answer; CLAIMED has the new row in values and nulls.
 */
static void
take(IdemStore *store, const ClaimRequest *request, Judgement *j, Datum *values, bool *nulls)
{
	idem_lock_key(store);
	for (;;)
	{
		TM_Result	result;

		idem_look(store);
		judge(store, request, j);
		if (j->action == CLAIM_ANSWER)
			break;

		if (j->action == CLAIM_INSERT)
		{
			fill_claim(store, request, j, values, nulls);
			result = idem_insert(store, values, nulls) ? TM_Ok : TM_Updated;
		}
		else
			result = claim_row(store, request, j, values, nulls);

		if (result == TM_Ok)
		{
			idem_xact_claimed(store, DatumGetInt64(values[IDEM_COL_TOKEN - 1]));
			answer(j, IDEM_OUT_CLAIMED, NULL);
			break;
		}
		if (result == TM_BeingModified)
		{
			answer_locked(store, j);
			break;
		}
	}
	idem_unlock_key(store);
}

/* idem_claim's row from a table row and what was judged of it. */
static Datum
make_result(IdemStore *store, const Judgement *j, const Datum *row, const bool *row_nulls)
{
	Datum		values[IDEM_NCLAIM] = {0};
	bool		nulls[IDEM_NCLAIM];
	IdemOutcome outcome = j->outcome;

#define COPY(out, column) \
	(values[out] = row[(column) - 1], nulls[out] = row_nulls[(column) - 1])
#define COPY_LONG(out, column) \
	(nulls[out] = row_nulls[(column) - 1], \
	 values[out] = nulls[out] ? (Datum) 0 : idem_fetch_long(row[(column) - 1]))

	memset(nulls, true, sizeof(nulls));
	values[IDEM_CLAIM_OUTCOME] = ObjectIdGetDatum(store->table->outcome[outcome]);
	nulls[IDEM_CLAIM_OUTCOME] = false;
	if (j->retry_after > 0)
	{
		values[IDEM_CLAIM_RETRY_AFTER] = idem_make_interval(j->retry_after);
		nulls[IDEM_CLAIM_RETRY_AFTER] = false;
	}
	if (row != NULL)
	{
		COPY(IDEM_CLAIM_ATTEMPT, IDEM_COL_ATTEMPT);
		COPY(IDEM_CLAIM_CREATED_AT, IDEM_COL_CREATED_AT);
		COPY(IDEM_CLAIM_EXPIRES_AT, IDEM_COL_EXPIRES_AT);
		if (outcome == IDEM_OUT_CLAIMED)
		{
			COPY(IDEM_CLAIM_TOKEN, IDEM_COL_TOKEN);
			COPY_LONG(IDEM_CLAIM_CHECKPOINT, IDEM_COL_CHECKPOINT);
			COPY_LONG(IDEM_CLAIM_STATE, IDEM_COL_STATE);
		}
		else if (outcome != IDEM_OUT_PROCESSING)
		{
			COPY(IDEM_CLAIM_HTTP_STATUS, IDEM_COL_HTTP_STATUS);
			COPY_LONG(IDEM_CLAIM_HEADERS, IDEM_COL_HEADERS);
			COPY_LONG(IDEM_CLAIM_RESPONSE, IDEM_COL_RESPONSE);
			COPY_LONG(IDEM_CLAIM_BODY, IDEM_COL_BODY);
			COPY(IDEM_CLAIM_COMPLETED_AT, IDEM_COL_COMPLETED_AT);
		}
	}
#undef COPY
#undef COPY_LONG

	return HeapTupleGetDatum(heap_form_tuple(store->table->claim_desc, values, nulls));
}

/* One try, without waiting.  Leaves the store open, and the row to answer with. */
static void
claim_once(IdemStore *store, const ClaimRequest *request, Judgement *j,
		   Datum **row, bool **nulls)
{
	idem_open(store, &request->name, AccessShareLock);
	idem_look(store);
	judge(store, request, j);
	if (j->action != CLAIM_ANSWER && !idem_is_writable())
	{
		/* Be sure before we refuse what might only be a replay. */
		idem_look_again(store);
		judge(store, request, j);
	}
	if (j->action != CLAIM_ANSWER)
	{
		int			natts;

		idem_close(store);
		idem_require_writable("idem_claim()");
		idem_open(store, &request->name, RowExclusiveLock);
		natts = RelationGetDescr(store->rel)->natts;
		*row = palloc(natts * sizeof(Datum));
		*nulls = palloc(natts * sizeof(bool));
		take(store, request, j, *row, *nulls);
		if (j->outcome == IDEM_OUT_CLAIMED)
			return;
		pfree(*row);
		pfree(*nulls);
	}
	*row = j->subject != NULL ? j->subject->slot->tts_values : NULL;
	*nulls = j->subject != NULL ? j->subject->slot->tts_isnull : NULL;
}

/*
 * idem_claim(key text, request jsonb, scope text, operation text,
 *			  request_hash bytea, ttl interval, lease interval, wait interval,
 *			  takeover boolean) -> one row
 *
 * Claims the key for the caller, or tells how it stands: see judge() for the
 * order of the outcomes.  request_hash, where given, stands for the request's
 * fingerprint.  wait: how long to wait at most while the key is processing.
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
	ClaimRequest request = {0};
	IdemWait	wait;
	int64		wait_for;

	request.name = idem_arg_key(fcinfo, 0, 2);
	request.operation = idem_arg_name(fcinfo, 3, "operation");
	request.hash = idem_arg_hash(fcinfo, 4);
	request.ttl = idem_arg_ttl(fcinfo, 5);
	request.lease = idem_arg_lease(fcinfo, 6);
	wait_for = idem_arg_wait(fcinfo, 7);
	request.takeover = idem_arg_bool(fcinfo, 8, "takeover");
	if (request.hash == NULL && !PG_ARGISNULL(1))
		request.hash = idem_fingerprint_of(PG_GETARG_JSONB_P(1), NULL);

	idem_wait_begin(&wait, wait_for);
	for (;;)
	{
		IdemStore	store;
		Judgement	j;
		Datum	   *row;
		bool	   *nulls;

		claim_once(&store, &request, &j, &row, &nulls);
		if (j.outcome != IDEM_OUT_PROCESSING || j.own || idem_wait_is_over(&wait, j.vanishing))
		{
			Datum		result = make_result(&store, &j, row, nulls);

			idem_close(&store);
			PG_RETURN_DATUM(result);
		}
		idem_close(&store);
		idem_wait_pause(&wait, j.lease_until);
	}
}
