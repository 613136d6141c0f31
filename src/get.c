/*-------------------------------------------------------------------------
 *
 * get.c
 *	  idem_get: how a key stands, without touching it.
 *
 * The same look as everybody else's, so it shows the last committed state (or
 * this transaction's own) at every isolation level and takes no predicate
 * lock.  What another transaction has not committed is not shown.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "fmgr.h"
#include "funcapi.h"
#include "utils/timestamp.h"

#include "args.h"
#include "state.h"
#include "store.h"

static const IdemColumn shown[] = {
	IDEM_COL_SCOPE, IDEM_COL_KEY, IDEM_COL_OPERATION, IDEM_COL_STATUS, IDEM_COL_ATTEMPT,
	IDEM_COL_CHECKPOINT, IDEM_COL_STATE, IDEM_COL_HTTP_STATUS, IDEM_COL_HEADERS,
	IDEM_COL_RESPONSE, IDEM_COL_BODY, IDEM_COL_CREATED_AT, IDEM_COL_LEASE_UNTIL,
	IDEM_COL_COMPLETED_AT, IDEM_COL_EXPIRES_AT
};
#define NSHOWN ((int) lengthof(shown))
#define OUT_STATUS 3

static Datum
make_row(IdemStore *store, TupleDesc desc)
{
	IdemVersion *row = &store->current;
	TimestampTz now = GetCurrentTimestamp();
	Datum		values[NSHOWN + 1];
	bool		nulls[NSHOWN + 1];

	for (int i = 0; i < NSHOWN; i++)
	{
		values[i] = idem_value(row, shown[i]);
		nulls[i] = idem_isnull(row, shown[i]);
		if (!nulls[i] && TupleDescAttr(desc, i)->attlen == -1)
			values[i] = idem_fetch_long(values[i]);
	}
	values[OUT_STATUS] = ObjectIdGetDatum(store->table->status[idem_status_at(store, row, now)]);
	values[NSHOWN] = BoolGetDatum(!idem_is_live(row, now));
	nulls[NSHOWN] = false;
	return HeapTupleGetDatum(heap_form_tuple(desc, values, nulls));
}

/*
 * idem_get(key text, scope text) -> no row or one
 *
 * expired: the row counts as absent and waits to be swept.  status is the
 * effective one: a claim that must not be taken over shows unknown when its
 * lease has ended.
 *
 * Errors: IK400, 42501.
 */
PG_FUNCTION_INFO_V1(idem_get);
Datum
idem_get(PG_FUNCTION_ARGS)
{
	FuncCallContext *context;

	if (SRF_IS_FIRSTCALL())
	{
		IdemKey		name = idem_arg_key(fcinfo, 0, 1);
		IdemStore	store;
		TupleDesc	desc;
		Datum		result = (Datum) 0;
		bool		found;

		context = SRF_FIRSTCALL_INIT();
		if (get_call_result_type(fcinfo, NULL, &desc) != TYPEFUNC_COMPOSITE)
			elog(ERROR, "return type must be a row type");
		desc = BlessTupleDesc(desc);

		idem_open(&store, &name, AccessShareLock);
		idem_look(&store);
		if (!store.current.exists)
			idem_look_again(&store);
		found = store.current.exists;
		if (found)
			result = make_row(&store, desc);
		idem_close(&store);
		if (found)
			SRF_RETURN_NEXT(context, result);
		SRF_RETURN_DONE(context);
	}

	context = SRF_PERCALL_SETUP();
	SRF_RETURN_DONE(context);
}
