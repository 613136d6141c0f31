/*-------------------------------------------------------------------------
 *
 * claim.h
 *	  Claiming a key: what is asked for, what is decided, what is answered.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_CLAIM_H
#define IDEM_CLAIM_H

#include "batch.h"
#include "store.h"

typedef struct IdemRequest
{
	text	   *operation;
	bytea	   *hash;			/* NULL: don't compare */
	int64		ttl;
	int64		lease;
	bool		takeover;
	bool		once;			/* seen or not is all that matters */
} IdemRequest;

typedef enum IdemAction
{
	IDEM_ANSWER,				/* nothing to write */
	IDEM_INSERT,				/* the key is absent */
	IDEM_RESTART,				/* its row has expired */
	IDEM_TAKE_OVER				/* the last attempt has ended */
} IdemAction;

typedef struct IdemJudgement
{
	IdemAction	action;
	IdemOutcome outcome;		/* with IDEM_ANSWER */
	IdemVersion *subject;		/* the version it is about, if any */
	bool		own;			/* this very transaction holds the key */
	bool		vanishing;		/* look again soon: a row is locked, or going */
	bool		row_locked;		/* the former, so that one can stand in line */
	int64		retry_after;	/* microseconds; 0: not said */
	TimestampTz lease_until;	/* with IDEM_OUT_PROCESSING */
	TimestampTz now;
} IdemJudgement;

/* A judgement that is an answer, and the row that goes with it, if any. */
typedef struct IdemAnswer
{
	IdemJudgement j;
	uint64		writes;			/* to the key's slot, before the look */
	Datum	   *values;
	bool	   *nulls;
} IdemAnswer;

/* judge.c */
extern void idem_judge(IdemStore *store, const IdemRequest *request, IdemJudgement *j);
extern void idem_answer(IdemJudgement *j, IdemOutcome outcome, IdemVersion *subject);
extern void idem_answer_locked(IdemStore *store, IdemJudgement *j);

/* claim.c */
extern bool idem_answer_at_once(IdemStore *store, const IdemRequest *request, IdemAnswer *a);
extern void idem_count_answer(const IdemRequest *request, const IdemAnswer *a);
extern void idem_take(IdemStore *store, const IdemRequest *request, IdemAnswer *a);
extern void idem_claim_waiting(IdemStore *store, const IdemKey *name, const IdemRequest *request,
							   int64 duration, const char *function, IdemAnswer *a);

/* claim_many.c */
typedef void (*IdemReceiver) (IdemStore *store, int i, const IdemAnswer *a, void *arg);
extern void idem_claim_batch(const IdemBatch *batch, IdemRequest *request, bytea **hashes,
							 bool wait, const char *function, IdemReceiver receive, void *arg);

/* answer.c */
extern void idem_answer_columns(const IdemStore *store, const IdemAnswer *a,
								Datum *values, bool *nulls);

#endif							/* IDEM_CLAIM_H */
