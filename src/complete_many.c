/*-------------------------------------------------------------------------
 *
 * complete_many.c
 *	  idem_complete_many: results for many claims, in one call.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "utils/memutils.h"

#include "args.h"
#include "batch.h"
#include "change.h"

/*
 * idem_complete_many(keys text[], tokens bigint[], responses jsonb[],
 *					  scope text, ttl interval) -> bigint
 *
 * As many calls of idem_complete; the number of those that were true.  All or
 * nothing: what one of them raises, such as IK410 for a claim that was lost,
 * is raised for the batch.
 *
 * Errors: as idem_complete.
 */
PG_FUNCTION_INFO_V1(idem_complete_many);
Datum
idem_complete_many(PG_FUNCTION_ARGS)
{
	IdemBatch	batch;
	IdemElements tokens;
	IdemElements responses;
	IdemResult	result = IDEM_NO_RESULT;
	IdemChange	change;
	IdemKey		name;
	MemoryContext old = CurrentMemoryContext;
	int64		ttl;
	int64		completed = 0;

	idem_arg_batch(fcinfo, 0, 3, &batch);
	tokens = idem_arg_elements(fcinfo, 1, &batch, "tokens");
	responses = idem_arg_elements(fcinfo, 2, &batch, "responses");
	ttl = idem_arg_duration(fcinfo, 4, "ttl", false);
	for (int i = 0; i < batch.nkeys; i++)
	{
		result.response = idem_element(&responses, i);
		idem_check_result(&result);
	}

	name.scope = batch.scope;
	name.key = NULL;
	idem_begin_change(&change, "idem_complete_many()", name, IDEM_OWNERS_CLAIM);
	for (int k = 0; k < batch.nkeys; k++)
	{
		int			i = batch.order[k];

		name.key = batch.keys[i];
		result.response = idem_element(&responses, i);
		idem_next_change(&change, &name, idem_element(&tokens, i));
		MemoryContextSwitchTo(batch.per_key);
		completed += idem_settle(&change, IDEM_COMPLETED, &result, ttl, 0);
		MemoryContextSwitchTo(old);
		MemoryContextReset(batch.per_key);
	}
	idem_finish_change(&change, (Datum) 0);
	PG_RETURN_INT64(completed);
}
