/*-------------------------------------------------------------------------
 *
 * judge.c
 *	  How a key stands for somebody who wants to claim it.
 *
 * Decides by what a look has found and the clock, and changes nothing.
 * idem_judge() has the order of the outcomes that the contract gives; the
 * writing (claim.c) adds "claimed", and "processing" for a row that is locked.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "utils/timestamp.h"

#include "claim.h"
#include "state.h"

/* What is suggested at least, where nothing is known about how long it takes. */
#define SHORTEST_RETRY	USECS_PER_SEC
#define LONGEST_RETRY	(60 * USECS_PER_SEC)
#define VANISHING_RETRY	(USECS_PER_SEC / 10)

/*
 * Is this the request the row was claimed for?  A request that wasn't given,
 * then or now, is not compared.
 */
static bool
same_request(const IdemVersion *version, const IdemRequest *request)
{
	if (!idem_same_bytes(DatumGetTextPP(idem_value(version, IDEM_COL_OPERATION)),
						 request->operation))
		return false;
	if (request->hash == NULL || idem_isnull(version, IDEM_COL_REQUEST_HASH))
		return true;
	return idem_same_bytes(DatumGetByteaPP(idem_value(version, IDEM_COL_REQUEST_HASH)),
						   request->hash);
}

void
idem_answer(IdemJudgement *j, IdemOutcome outcome, IdemVersion *subject)
{
	j->action = IDEM_ANSWER;
	j->outcome = outcome;
	j->subject = subject;
}

/*
 * When to ask again: as long again as the owner has been at it, within bounds,
 * and never past the lease.
 */
static void
answer_processing(IdemJudgement *j, IdemVersion *subject)
{
	TimestampTz claimed_at = idem_instant(subject, IDEM_COL_CLAIMED_AT);
	int64		hint = Max(SHORTEST_RETRY, Min(LONGEST_RETRY, j->now - claimed_at));

	idem_answer(j, IDEM_OUT_PROCESSING, subject);
	j->lease_until = idem_instant(subject, IDEM_COL_LEASE_UNTIL);
	if (j->lease_until > j->now)
		hint = Min(hint, j->lease_until - j->now);
	else if (j->lease_until > claimed_at)
		hint = Min(hint, j->lease_until - claimed_at);	/* over, yet not committed */
	j->retry_after = hint;
}

static void
answer_retryable(IdemJudgement *j, IdemVersion *subject)
{
	idem_answer(j, IDEM_OUT_RETRYABLE, subject);
	j->retry_after = idem_instant(subject, IDEM_COL_RETRY_AT) - j->now;
}

/* The row is there, expired, and about to be gone, or locked to be deleted. */
static void
answer_vanishing(IdemJudgement *j)
{
	idem_answer(j, IDEM_OUT_PROCESSING, NULL);
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
judge_unfinished(IdemStore *store, IdemJudgement *j, bool live)
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
judge_live(IdemStore *store, IdemJudgement *j)
{
	IdemVersion *row = &store->current;

	switch (idem_status_at(store, row, j->now))
	{
		case IDEM_PROCESSING:
			j->own = row->own;
			if (row->own || idem_instant(row, IDEM_COL_LEASE_UNTIL) > j->now)
				answer_processing(j, row);
			else
				j->action = IDEM_TAKE_OVER;
			break;
		case IDEM_RETRYABLE:
			if (is_backing_off(store, row, j->now))
				answer_retryable(j, row);
			else
				j->action = IDEM_TAKE_OVER;
			break;
		case IDEM_COMPLETED:
			idem_answer(j, IDEM_OUT_COMPLETED, row);
			break;
		case IDEM_FAILED:
			idem_answer(j, IDEM_OUT_FAILED, row);
			break;
		default:
			idem_answer(j, IDEM_OUT_UNKNOWN, row);
	}
}

static bool
is_settled(IdemStatus status)
{
	return status == IDEM_COMPLETED || status == IDEM_FAILED || status == IDEM_UNKNOWN;
}

/*
 * Was the key claimed for another request?  A settled row stands whatever an
 * unfinished transaction makes of it.  Otherwise both that row and what is to
 * replace it may come to stand, so both must be another request's.
 */
static bool
is_other_request(IdemStore *store, const IdemRequest *request, TimestampTz now,
				 bool live, bool settled)
{
	const IdemVersion *pending = &store->pending;
	bool		replaces = !settled && !pending->replaced && idem_is_live(pending, now);

	if (live && same_request(&store->current, request))
		return false;
	if (replaces && same_request(pending, request))
		return false;
	return live || replaces;
}

/* The contract's order: mismatch, settled, unknown, processing, retryable, claimed. */
void
idem_judge(IdemStore *store, const IdemRequest *request, IdemJudgement *j)
{
	IdemVersion *current = &store->current;
	bool		live;
	bool		unfinished;
	bool		settled;

	memset(j, 0, sizeof(*j));
	j->now = GetCurrentTimestamp();
	live = idem_is_live(current, j->now);

	unfinished = store->pending.exists ||
		(current->exists && TransactionIdIsValid(current->busy));
	settled = live && is_settled(idem_status_at(store, current, j->now));

	if (live && request->once)
	{
		idem_answer(j, IDEM_OUT_COMPLETED, current);
		return;
	}

	if (!request->once && is_other_request(store, request, j->now, live, settled))
		idem_answer(j, IDEM_OUT_MISMATCH, NULL);
	else if (unfinished && !settled)
		judge_unfinished(store, j, live);
	else if (live)
		judge_live(store, j);
	else
		j->action = current->exists ? IDEM_RESTART : IDEM_INSERT;
}

/*
 * Somebody holds a lock on the row, as a sweep does that is about to delete
 * it; soon it will be known.
 */
void
idem_answer_locked(IdemStore *store, IdemJudgement *j)
{
	if (idem_is_live(&store->current, j->now))
		answer_processing(j, &store->current);
	else
		answer_vanishing(j);
	j->vanishing = true;
	j->row_locked = true;
}
