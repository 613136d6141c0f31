/*-------------------------------------------------------------------------
 *
 * claim_many.c
 *	  idem_claim_many: a claim for each of many keys, in one call.
 *
 * One after the other, as single claims would be, but with one open table and
 * all that hangs on it.  A key lock is let go before the next one is taken.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "fmgr.h"
#include "funcapi.h"
#include "utils/jsonb.h"

#include "args.h"
#include "batch.h"
#include "claim.h"
#include "fingerprint.h"

/* The table is open for reading until the first key that has to be written. */
static void
open_for_writing(IdemStore *store, const IdemKey *name, const char *function)
{
	if (store->lockmode == RowExclusiveLock)
		return;
	idem_require_writable(function);
	idem_close(store);
	idem_open(store, name, RowExclusiveLock);
}

/*
 * Claims the keys of a batch; receive() gets each answer, in the order of the
 * batch.  hashes: of the requests, or NULL.  With wait nobody's open claim is
 * an answer.
 */
void
idem_claim_batch(const IdemBatch *batch, IdemRequest *request, bytea **hashes,
				 bool wait, const char *function, IdemReceiver receive, void *arg)
{
	MemoryContext old = CurrentMemoryContext;
	IdemKey		name = {batch->scope, NULL};
	IdemStore	store;
	IdemAnswer	answer;

	idem_open(&store, &name, AccessShareLock);
	for (int k = 0; k < batch->nkeys; k++)
	{
		int			i = batch->order[k];

		name.key = batch->keys[i];
		request->hash = hashes != NULL ? hashes[i] : NULL;
		idem_select(&store, &name);

		MemoryContextSwitchTo(batch->per_key);
		if (!idem_answer_at_once(&store, request, &answer))
		{
			MemoryContextSwitchTo(old);
			open_for_writing(&store, &name, function);
			MemoryContextSwitchTo(batch->per_key);
			idem_take(&store, request, &answer);
		}
		if (wait && answer.j.outcome == IDEM_OUT_PROCESSING)
		{
			IdemStore	waiting;

			idem_close(&store);
			idem_claim_waiting(&waiting, &name, request, IDEM_FOREVER, function, &answer);
			receive(&waiting, i, &answer, arg);
			idem_close(&waiting);
			MemoryContextSwitchTo(old);
			idem_open(&store, &name, AccessShareLock);
		}
		else
		{
			idem_count_answer(request, &answer);
			receive(&store, i, &answer, arg);
		}
		MemoryContextSwitchTo(old);
		MemoryContextReset(batch->per_key);
	}
	idem_close(&store);
}

/* What idem_claim_many's receiver needs. */
typedef struct Rows
{
	const IdemBatch *batch;
	TupleDesc	desc;
	HeapTuple  *tuples;
	MemoryContext context;
} Rows;

#define COL_ORDINAL 0
#define COL_KEY 1
#define NCOLS (IDEM_NCLAIM + 2)

static void
make_row(IdemStore *store, int i, const IdemAnswer *a, void *arg)
{
	Rows	   *rows = (Rows *) arg;
	Datum		values[NCOLS];
	bool		nulls[NCOLS];
	MemoryContext old;

	values[COL_ORDINAL] = Int32GetDatum(i + 1);
	values[COL_KEY] = PointerGetDatum(rows->batch->keys[i]);
	nulls[COL_ORDINAL] = nulls[COL_KEY] = false;
	idem_answer_columns(store, a, values + 2, nulls + 2);
	old = MemoryContextSwitchTo(rows->context);
	rows->tuples[i] = heap_form_tuple(rows->desc, values, nulls);
	MemoryContextSwitchTo(old);
}

/* The fingerprints of the requests, or NULL if nothing is to be compared. */
static bytea **
arg_hashes(FunctionCallInfo fcinfo, int arg, const IdemBatch *batch)
{
	IdemElements requests = idem_arg_elements(fcinfo, arg, batch, "requests");
	bytea	  **hashes;

	if (requests.values == NULL)
		return NULL;
	hashes = palloc(batch->nkeys * sizeof(bytea *));
	for (int i = 0; i < batch->nkeys; i++)
		hashes[i] = requests.nulls[i] ? NULL :
			idem_fingerprint_of(DatumGetJsonbP(requests.values[i]), NULL);
	return hashes;
}

/*
 * idem_claim_many(keys text[], requests jsonb[], scope text, operation text,
 *				   ttl interval, lease interval, takeover boolean)
 *	-> a row for each key: its place in the array (from 1), the key, and what
 *	   idem_claim returns
 *
 * As many calls of idem_claim without wait.  A key that is in the array twice
 * is claimed for its first place, and processing for the second.
 *
 * Errors: as idem_claim; a bad key refuses them all.
 */
PG_FUNCTION_INFO_V1(idem_claim_many);
Datum
idem_claim_many(PG_FUNCTION_ARGS)
{
	IdemBatch	batch;
	IdemRequest request = {0};
	bytea	  **hashes;
	Rows		rows;
	Tuplestorestate *set;

	idem_arg_batch(fcinfo, 0, 2, &batch);
	hashes = arg_hashes(fcinfo, 1, &batch);
	request.operation = idem_arg_name(fcinfo, 3, "operation");
	request.ttl = idem_arg_ttl(fcinfo, 4);
	request.lease = idem_arg_lease(fcinfo, 5);
	request.takeover = idem_arg_bool(fcinfo, 6, "takeover");

	set = idem_begin_set(fcinfo, &rows.desc);
	if (rows.desc->natts != NCOLS)
		elog(ERROR, "idem_claim_many() returns %d columns", rows.desc->natts);
	rows.batch = &batch;
	rows.context = CurrentMemoryContext;
	rows.tuples = palloc(batch.nkeys * sizeof(HeapTuple));
	idem_claim_batch(&batch, &request, hashes, false, "idem_claim_many()", make_row, &rows);
	for (int i = 0; i < batch.nkeys; i++)
		tuplestore_puttuple(set, rows.tuples[i]);
	return (Datum) 0;
}
