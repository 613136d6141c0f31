/*-------------------------------------------------------------------------
 *
 * once.c
 *	  idem_once, idem_once_many: has this message been seen before?
 *
 * A row that is completed from the start, in the transaction that does what
 * the message asks for.  A rival that has not committed is waited for without
 * limit, as an INSERT waits for a unique key; if it rolls back, the waiter is
 * the first.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "funcapi.h"

#include "args.h"
#include "claim.h"

static IdemRequest
once_request(int64 ttl)
{
	IdemRequest request = {0};

	request.operation = palloc(VARHDRSZ);
	SET_VARSIZE(request.operation, VARHDRSZ);
	request.ttl = ttl;
	request.takeover = true;
	request.once = true;
	return request;
}

static bool
is_first(const IdemKey *name, const IdemRequest *request, const char *function)
{
	IdemStore	store;
	IdemAnswer	answer;

	idem_claim_waiting(&store, name, request, IDEM_FOREVER, function, &answer);
	idem_close(&store);
	if (answer.j.outcome == IDEM_OUT_PROCESSING)
		idem_require_writable(function);	/* a standby doesn't wait */
	return answer.j.outcome == IDEM_OUT_CLAIMED;
}

/*
 * idem_once(key text, scope text, ttl interval) -> boolean
 *
 * True for the first caller, false for every later one while the key is live,
 * whoever made it and in whatever state it is.
 *
 * Errors: IK400; 42501 for a scope that isn't the role's; 25006 for a first
 * call in a read-only transaction or on a standby; 40P01 where waiting for a
 * rival closes a cycle.
 */
PG_FUNCTION_INFO_V1(idem_once);
Datum
idem_once(PG_FUNCTION_ARGS)
{
	IdemKey		name = idem_arg_key(fcinfo, 0, 1);
	IdemRequest request = once_request(idem_arg_ttl(fcinfo, 2));

	PG_RETURN_BOOL(is_first(&name, &request, "idem_once()"));
}

static void
note_first(IdemStore *store, int i, const IdemAnswer *a, void *arg)
{
	bool	   *first = (bool *) arg;

	if (a->j.outcome == IDEM_OUT_PROCESSING)
		idem_require_writable("idem_once_many()");
	first[i] = a->j.outcome == IDEM_OUT_CLAIMED;
}

/*
 * idem_once_many(keys text[], scope text, ttl interval) -> setof text
 *
 * Those of the keys that idem_once would be true for, in the order of the
 * array; of one that is in it twice, the first.
 *
 * Errors: as idem_once; a bad key refuses them all.
 */
PG_FUNCTION_INFO_V1(idem_once_many);
Datum
idem_once_many(PG_FUNCTION_ARGS)
{
	IdemBatch	batch;
	IdemRequest request;
	Tuplestorestate *set;
	TupleDesc	desc;
	bool	   *first;

	idem_arg_batch(fcinfo, 0, 1, &batch);
	request = once_request(idem_arg_ttl(fcinfo, 2));
	set = idem_begin_set(fcinfo, &desc);

	first = palloc0(batch.nkeys * sizeof(bool));
	idem_claim_batch(&batch, &request, NULL, true, "idem_once_many()", note_first, first);
	for (int i = 0; i < batch.nkeys; i++)
	{
		Datum		key = PointerGetDatum(batch.keys[i]);
		bool		isnull = false;

		if (first[i])
			tuplestore_putvalues(set, desc, &key, &isnull);
	}
	return (Datum) 0;
}
