/*-------------------------------------------------------------------------
 *
 * settle.c
 *	  idem_complete and idem_fail: how a claim ends.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "utils/jsonb.h"
#include "utils/timestamp.h"

#include "change.h"
#include "state.h"
#include "stats.h"
#include "xact.h"

void
idem_set_result(IdemChange *s, IdemStatus status, const IdemResult *result)
{
	idem_set_column(s, IDEM_COL_STATUS, ObjectIdGetDatum(s->store.table->status[status]));
	idem_set_column(s, IDEM_COL_COMPLETED_AT, TimestampTzGetDatum(s->now));
	idem_set_null(s, IDEM_COL_LEASE_UNTIL);
	idem_set_null(s, IDEM_COL_RETRY_AT);
	idem_set_argument(s, IDEM_COL_HTTP_STATUS, result->http_status);
	idem_set_argument(s, IDEM_COL_HEADERS, result->headers);
	idem_set_argument(s, IDEM_COL_RESPONSE, result->response);
	idem_set_argument(s, IDEM_COL_BODY, result->body);
}

/*
 * How long the settled row is kept: its ttl from now on, but not less than a
 * retry has to wait; a row of unknown outcome until it is resolved.
 */
void
idem_set_retention(IdemChange *s, IdemStatus status, int64 ttl, TimestampTz retry_at)
{
	TimestampTz expires_at;

	if (ttl != 0)
		idem_set_column(s, IDEM_COL_TTL, idem_make_interval(ttl));
	else
		ttl = idem_stored_ttl(&s->store.current);

	expires_at = idem_later(s->now, ttl);
	if (status == IDEM_UNKNOWN)
		expires_at = DT_NOEND;
	else if (expires_at <= retry_at)
		expires_at = idem_later(retry_at, ttl);
	idem_set_expiry(s, expires_at);
}

static bool
same_jsonb(NullableDatum a, Datum b, bool b_isnull)
{
	if (a.isnull || b_isnull)
		return a.isnull == b_isnull;
	return compareJsonbContainers(&DatumGetJsonbP(a.value)->root,
								  &DatumGetJsonbP(b)->root) == 0;
}

bool
idem_same_result(const IdemChange *s, const IdemResult *result)
{
	const IdemVersion *row = &s->store.current;
	bool		isnull = idem_isnull(row, IDEM_COL_HTTP_STATUS);

	if (result->http_status.isnull != isnull ||
		(!isnull && DatumGetInt32(result->http_status.value) !=
		 DatumGetInt32(idem_value(row, IDEM_COL_HTTP_STATUS))))
		return false;

	isnull = idem_isnull(row, IDEM_COL_BODY);
	if (result->body.isnull != isnull ||
		(!isnull && !idem_same_bytes(DatumGetByteaPP(result->body.value),
									 DatumGetByteaPP(idem_value(row, IDEM_COL_BODY)))))
		return false;

	return same_jsonb(result->headers, idem_value(row, IDEM_COL_HEADERS),
					  idem_isnull(row, IDEM_COL_HEADERS)) &&
		same_jsonb(result->response, idem_value(row, IDEM_COL_RESPONSE),
				   idem_isnull(row, IDEM_COL_RESPONSE));
}

/*
 * Settles an open claim.  False if it has been settled before in just this
 * way; IK409 if in another.
 */
bool
idem_settle(IdemChange *s, IdemStatus status, const IdemResult *result, int64 ttl, int64 retry_after)
{
	do
	{
		TimestampTz retry_at = DT_NOBEGIN;

		(void) idem_find_row(s);
		if (s->status != IDEM_PROCESSING)
		{
			if (s->status != status || !idem_same_result(s, result))
				idem_already_settled(s);
			return false;
		}
		idem_set_result(s, status, result);
		if (status == IDEM_RETRYABLE)
		{
			retry_at = idem_later(s->now, retry_after);
			idem_set_column(s, IDEM_COL_RETRY_AT, TimestampTzGetDatum(retry_at));
		}
		idem_set_retention(s, status, ttl, retry_at);
	} while (!idem_write_row(s));

	idem_xact_settled(s->own_claim);
	idem_count(status == IDEM_COMPLETED ? IDEM_COUNT_COMPLETIONS : IDEM_COUNT_FAILURES);
	return true;
}

/* The arguments of a result; headers and body follow http_status. */
static IdemResult
arg_result(FunctionCallInfo fcinfo, int response, int http_status)
{
	IdemResult	result;

	result.response = fcinfo->args[response];
	result.http_status = fcinfo->args[http_status];
	result.headers = fcinfo->args[http_status + 1];
	result.body = fcinfo->args[http_status + 2];
	idem_check_result(&result);
	return result;
}

/*
 * idem_complete(key text, response jsonb, token bigint, scope text,
 *				 http_status int, headers jsonb, body bytea, ttl interval) -> boolean
 *
 * Stores the result.  True, or false if the claim was completed before with
 * the same token and the same result.
 *
 * Errors: IK400, IK404, IK409, IK410, IK413, 25006, 42501.
 */
PG_FUNCTION_INFO_V1(idem_complete);
Datum
idem_complete(PG_FUNCTION_ARGS)
{
	IdemChange	s;
	IdemKey		name = idem_arg_key(fcinfo, 0, 3);
	IdemResult	result;
	int64		ttl;

	result = arg_result(fcinfo, 1, 4);
	ttl = idem_arg_duration(fcinfo, 7, "ttl", false);

	idem_begin_change_with_token(&s, "idem_complete()", name, fcinfo->args[2]);
	PG_RETURN_DATUM(idem_finish_change(&s, BoolGetDatum(idem_settle(&s, IDEM_COMPLETED, &result, ttl, 0))));
}

/*
 * idem_fail(key text, error jsonb, token bigint, scope text,
 *			 disposition idem_disposition, retry_after interval,
 *			 http_status int, headers jsonb, body bytea, ttl interval) -> boolean
 *
 * Ends the claim without success: final = stored and replayed like a success;
 * retry = the next claim gets it, not before retry_after (which counts with
 * retry alone); unknown = held until idem_resolve.  Returns as idem_complete.
 *
 * Errors: IK400, IK404, IK409, IK410, IK413, 25006, 42501.
 */
PG_FUNCTION_INFO_V1(idem_fail);
Datum
idem_fail(PG_FUNCTION_ARGS)
{
	static const IdemStatus ends_as[IDEM_NDISPOSITION] =
	{IDEM_FAILED, IDEM_RETRYABLE, IDEM_UNKNOWN};

	IdemChange	s;
	IdemKey		name = idem_arg_key(fcinfo, 0, 3);
	IdemResult	result;
	int64		ttl;
	int64		retry_after;
	IdemDisposition disposition;

	if (PG_ARGISNULL(4))
		idem_bad_null("disposition", "Pass 'final', 'retry' or 'unknown'.");
	result = arg_result(fcinfo, 1, 6);
	retry_after = idem_arg_duration(fcinfo, 5, "retry_after", true);
	ttl = idem_arg_duration(fcinfo, 9, "ttl", false);

	idem_begin_change_with_token(&s, "idem_fail()", name, fcinfo->args[2]);
	disposition = idem_disposition_of(s.store.table, PG_GETARG_OID(4));
	PG_RETURN_DATUM(idem_finish_change(&s, BoolGetDatum(idem_settle(&s, ends_as[disposition], &result, ttl,
												   retry_after))));
}
