/*-------------------------------------------------------------------------
 *
 * answer.c
 *	  The row that idem_claim and its kin return.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "args.h"
#include "claim.h"

#define COPY(out, column) \
	(values[out] = row[(column) - 1], nulls[out] = row_nulls[(column) - 1])
#define COPY_LONG(out, column) \
	(nulls[out] = row_nulls[(column) - 1], \
	 values[out] = nulls[out] ? (Datum) 0 : idem_fetch_long(row[(column) - 1]))

/* What the table's row has for this outcome. */
static void
copy_row(const Datum *row, const bool *row_nulls, IdemOutcome outcome,
		 Datum *values, bool *nulls)
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

/* Fills in the IDEM_NCLAIM columns. */
void
idem_answer_columns(const IdemStore *store, const IdemAnswer *a, Datum *values, bool *nulls)
{
	memset(values, 0, IDEM_NCLAIM * sizeof(Datum));
	memset(nulls, true, IDEM_NCLAIM * sizeof(bool));
	values[IDEM_CLAIM_OUTCOME] = ObjectIdGetDatum(store->table->outcome[a->j.outcome]);
	nulls[IDEM_CLAIM_OUTCOME] = false;
	if (a->j.retry_after > 0)
	{
		values[IDEM_CLAIM_RETRY_AFTER] = idem_make_interval(a->j.retry_after);
		nulls[IDEM_CLAIM_RETRY_AFTER] = false;
	}
	if (a->values != NULL)
		copy_row(a->values, a->nulls, a->j.outcome, values, nulls);
}
