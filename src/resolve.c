/*-------------------------------------------------------------------------
 *
 * resolve.c
 *	  idem_resolve and idem_forget: what an administrator may do to any row.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "fmgr.h"
#include "miscadmin.h"
#include "utils/builtins.h"

#include "change.h"
#include "state.h"
#include "xact.h"

static IdemStatus
arg_resolution(IdemChange *s, FunctionCallInfo fcinfo, int arg)
{
	IdemStatus	status = IDEM_PROCESSING;

	if (!PG_ARGISNULL(arg))
		status = idem_status_of(s->store.table, PG_GETARG_OID(arg));
	if (status == IDEM_PROCESSING || status == IDEM_UNKNOWN)
		ereport(ERROR,
				(errcode(IDEM_ERRCODE_BAD_INPUT),
				 errmsg("a key can only be resolved as completed, failed or retryable"),
				 errhint("Pass one of these as the status.")));
	return status;
}

static void
log_resolution(const IdemChange *s, const char *status, NullableDatum note)
{
	ereport(LOG,
			(errmsg("idempotency key \"%s\" in scope \"%s\" was resolved as %s by \"%s\"",
					idem_changed_key(s), text_to_cstring(s->store.name.scope), status,
					GetUserNameFromId(GetUserId(), false)),
			 note.isnull ? 0 : errdetail("Note: %s", TextDatumGetCString(note.value))));
}

/*
 * idem_resolve(key text, status idem_status, response jsonb, scope text,
 *				note text) -> boolean
 *
 * For an administrator who knows how it ended: settles a row that is not
 * finally settled, without its token, and gives it a new one, so that its
 * owner is fenced off.  Who did it and the note go to the row and the server
 * log.  False if it stands settled in just this way already.
 *
 * Errors: IK400, IK404, IK409, IK413, 25006, 42501.
 */
PG_FUNCTION_INFO_V1(idem_resolve);
Datum
idem_resolve(PG_FUNCTION_ARGS)
{
	IdemChange	s;
	IdemKey		name = idem_arg_key(fcinfo, 0, 3);
	IdemResult	result = IDEM_NO_RESULT;
	NullableDatum note = fcinfo->args[4];
	IdemStatus	status;

	result.response = fcinfo->args[2];
	idem_check_result(&result);
	idem_check_size(idem_datum_size(note), "note");

	idem_begin_change(&s, "idem_resolve()", name, IDEM_LIVE_ROW);
	status = arg_resolution(&s, fcinfo, 1);
	do
	{
		(void) idem_find_row(&s);
		if (s.status == status && idem_same_result(&s, &result) &&
			idem_instant(&s.store.current, IDEM_COL_RETRY_AT) <= s.now)
			PG_RETURN_DATUM(idem_finish_change(&s, BoolGetDatum(false)));
		if (s.status == IDEM_COMPLETED || s.status == IDEM_FAILED)
			idem_already_settled(&s);
		idem_set_result(&s, status, &result);
		idem_set_retention(&s, status, 0, DT_NOBEGIN);
		idem_set_column(&s, IDEM_COL_TOKEN, Int64GetDatum(idem_next_token(&s.store)));
		idem_set_column(&s, IDEM_COL_RESOLVED_BY,
				   CStringGetTextDatum(GetUserNameFromId(GetUserId(), false)));
		idem_set_argument(&s, IDEM_COL_NOTE, note);
	} while (!idem_write_row(&s));

	idem_xact_settled(s.own_claim);
	log_resolution(&s, idem_status_name(status), note);
	PG_RETURN_DATUM(idem_finish_change(&s, BoolGetDatum(true)));
}

/*
 * idem_forget(key text, scope text) -> boolean
 *
 * Deletes the row, whatever its state, so that the key can be claimed anew; a
 * claim that is open is lost to its owner (IK404).  False if there was none.
 *
 * Errors: IK400, 25006, 42501.
 */
PG_FUNCTION_INFO_V1(idem_forget);
Datum
idem_forget(PG_FUNCTION_ARGS)
{
	IdemChange	s;
	IdemKey		name = idem_arg_key(fcinfo, 0, 1);

	idem_begin_change(&s, "idem_forget()", name, IDEM_ANY_ROW);
	idem_prepare_delete(&s.store);
	do
	{
		if (!idem_find_row(&s))
			PG_RETURN_DATUM(idem_finish_change(&s, BoolGetDatum(false)));
	} while (!idem_is_written(&s, idem_delete(&s.store), LockTupleExclusive));
	idem_xact_settled(s.own_claim);
	PG_RETURN_DATUM(idem_finish_change(&s, BoolGetDatum(true)));
}
