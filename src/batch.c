/*-------------------------------------------------------------------------
 *
 * batch.c
 *	  The keys of a call that has many.
 *
 * The keys are gone through in the order of their bytes, and equal ones in the
 * order of the array, whatever the caller's order is.  So two batches that
 * wait for each other's keys never do so in a circle.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "funcapi.h"
#include "miscadmin.h"
#include "utils/array.h"
#include "utils/lsyscache.h"
#include "utils/memutils.h"

#include "args.h"
#include "batch.h"

static int
compare_keys(const void *a, const void *b, void *arg)
{
	text	  **keys = (text **) arg;
	int			ia = *(const int *) a;
	int			ib = *(const int *) b;
	int			la = VARSIZE_ANY_EXHDR(keys[ia]);
	int			lb = VARSIZE_ANY_EXHDR(keys[ib]);
	int			result = memcmp(VARDATA_ANY(keys[ia]), VARDATA_ANY(keys[ib]), Min(la, lb));

	if (result == 0)
		result = (la > lb) - (la < lb);
	return result != 0 ? result : (ia > ib) - (ia < ib);
}

static void
report_element(void *arg)
{
	errcontext("element %d of the array of keys", *(int *) arg + 1);
}

/* Checks every key before anything is done, and says which one is bad. */
static void
check_keys(IdemBatch *batch, const Datum *values, const bool *nulls)
{
	ErrorContextCallback callback;
	int			i;

	callback.callback = report_element;
	callback.arg = &i;
	callback.previous = error_context_stack;
	error_context_stack = &callback;
	for (i = 0; i < batch->nkeys; i++)
	{
		NullableDatum value = {values[i], nulls[i]};

		batch->keys[i] = idem_check_key(value);
		batch->order[i] = i;
	}
	error_context_stack = callback.previous;
}

void
idem_arg_batch(FunctionCallInfo fcinfo, int keys_arg, int scope_arg, IdemBatch *batch)
{
	Datum	   *values;
	bool	   *nulls;

	if (PG_ARGISNULL(keys_arg))
		idem_bad_null("array of keys", "For no keys pass '{}'.");
	batch->scope = idem_arg_scope(fcinfo, scope_arg);
	deconstruct_array(PG_GETARG_ARRAYTYPE_P(keys_arg), TEXTOID, -1, false, TYPALIGN_INT,
					  &values, &nulls, &batch->nkeys);
	batch->keys = palloc(batch->nkeys * sizeof(text *));
	batch->order = palloc(batch->nkeys * sizeof(int));
	check_keys(batch, values, nulls);
	qsort_arg(batch->order, batch->nkeys, sizeof(int), compare_keys, batch->keys);
	batch->per_key = AllocSetContextCreate(CurrentMemoryContext, "idempotency key",
										   ALLOCSET_DEFAULT_SIZES);
}

/* An array with an element for each key; null is one of nulls. */
IdemElements
idem_arg_elements(FunctionCallInfo fcinfo, int arg, const IdemBatch *batch, const char *what)
{
	IdemElements elements = {NULL, NULL};
	ArrayType  *array;
	int16		len;
	bool		byval;
	char		align;
	int			n;

	if (PG_ARGISNULL(arg))
		return elements;
	array = PG_GETARG_ARRAYTYPE_P(arg);
	get_typlenbyvalalign(ARR_ELEMTYPE(array), &len, &byval, &align);
	deconstruct_array(array, ARR_ELEMTYPE(array), len, byval, align,
					  &elements.values, &elements.nulls, &n);
	if (n != batch->nkeys)
		ereport(ERROR,
				(errcode(IDEM_ERRCODE_BAD_INPUT),
				 errmsg("array of %s does not match the array of keys", what),
				 errdetail("Numbers of elements: %d and %d.", n, batch->nkeys),
				 errhint("Pass one for each key, null where there is none.")));
	return elements;
}

NullableDatum
idem_element(const IdemElements *elements, int i)
{
	NullableDatum element = {(Datum) 0, true};

	if (elements->values != NULL && !elements->nulls[i])
	{
		element.value = elements->values[i];
		element.isnull = false;
	}
	return element;
}

/* The result of a set-returning call, to be filled by the caller. */
Tuplestorestate *
idem_begin_set(FunctionCallInfo fcinfo, TupleDesc *desc)
{
	ReturnSetInfo *rsinfo = (ReturnSetInfo *) fcinfo->resultinfo;
	MemoryContext old;

	if (rsinfo == NULL || !IsA(rsinfo, ReturnSetInfo) ||
		(rsinfo->allowedModes & SFRM_Materialize) == 0)
		ereport(ERROR,
				(errcode(ERRCODE_FEATURE_NOT_SUPPORTED),
				 errmsg("set-valued function called in context that cannot accept a set"),
				 errhint("Call it in FROM.")));

	old = MemoryContextSwitchTo(rsinfo->econtext->ecxt_per_query_memory);
	rsinfo->returnMode = SFRM_Materialize;
	rsinfo->setResult = tuplestore_begin_heap((rsinfo->allowedModes & SFRM_Materialize_Random) != 0,
											  false, work_mem);
	if (get_call_result_type(fcinfo, NULL, desc) == TYPEFUNC_SCALAR)
		*desc = CreateTupleDescCopy(rsinfo->expectedDesc);
	rsinfo->setDesc = *desc;
	MemoryContextSwitchTo(old);
	return rsinfo->setResult;
}
