/*-------------------------------------------------------------------------
 *
 * execute.c
 *	  idem_execute: run a command once, and hand its result to every caller.
 *
 * Claim, command and result belong to the caller's transaction.  The command
 * runs in a subtransaction, so that its error takes back what it did and
 * leaves the claim, which then stores the error.  An error that says nothing
 * about the request, such as a deadlock or a cancel, is raised again, and
 * takes the claim with it.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "executor/spi.h"
#include "fmgr.h"
#include "funcapi.h"
#include "nodes/makefuncs.h"
#include "nodes/params.h"
#include "tcop/tcopprot.h"
#include "utils/builtins.h"
#include "utils/datum.h"
#include "utils/fmgroids.h"
#include "utils/jsonb.h"
#include "utils/resowner.h"

#include "args.h"
#include "change.h"
#include "claim.h"
#include "fingerprint.h"
#include "settings.h"
#include "xact.h"

/*
 * What came of the command.  A mistake in it is the programmer's, not the
 * request's: it is raised and not stored, once the command has ended.
 */
typedef struct Run
{
	const char *mistake;
	const char *hint;
	ErrorData  *error;			/* if it has failed */
	NullableDatum value;		/* jsonb: its value, or its error */
} Run;

/* Any value as jsonb, as to_jsonb() has it. */
static Datum
value_to_jsonb(Datum value, Oid type)
{
	FmgrInfo	flinfo;
	List	   *args = list_make1(makeNullConst(type, -1, InvalidOid));

	fmgr_info(F_TO_JSONB, &flinfo);
	fmgr_info_set_expr((Node *) makeFuncExpr(F_TO_JSONB, JSONBOID, args, InvalidOid, InvalidOid,
											 COERCE_EXPLICIT_CALL), &flinfo);
	return FunctionCall1(&flinfo, value);
}

static bool
has_same_names(TupleDesc desc)
{
	for (int i = 1; i < desc->natts; i++)
		for (int j = 0; j < i; j++)
			if (namestrcmp(&TupleDescAttr(desc, i)->attname,
						   NameStr(TupleDescAttr(desc, j)->attname)) == 0)
				return true;
	return false;
}

/*
 * The value of the row that SPI has, if there is one: that of its only column,
 * or an object of all columns.
 */
static void
take_value(Run *run)
{
	TupleDesc	desc;
	HeapTuple	tuple;

	run->value.isnull = true;
	if (SPI_tuptable == NULL || SPI_tuptable->numvals == 0)
		return;
	tuple = SPI_tuptable->vals[0];
	desc = SPI_tuptable->tupdesc;
	if (SPI_tuptable->numvals > 1)
	{
		run->mistake = "command returned more than one row";
		run->hint = "Let it return one value, such as jsonb_agg(...) over the rows.";
	}
	else if (desc->natts == 1)
	{
		Datum		value = heap_getattr(tuple, 1, desc, &run->value.isnull);

		if (!run->value.isnull)
			run->value.value = value_to_jsonb(value, TupleDescAttr(desc, 0)->atttypid);
	}
	else if (has_same_names(desc))
	{
		run->mistake = "command returned two columns of the same name";
		run->hint = "Name the columns; they become the fields of an object.";
	}
	else
	{
		desc = BlessTupleDesc(desc);
		run->value.value = value_to_jsonb(heap_copy_tuple_as_datum(tuple, desc), RECORDOID);
		run->value.isnull = false;
	}
}

static ParamListInfo
make_params(NullableDatum args)
{
	ParamListInfo params = makeParamList(1);

	params->params[0].value = args.value;
	params->params[0].isnull = args.isnull;
	params->params[0].pflags = PARAM_FLAG_CONST;
	params->params[0].ptype = JSONBOID;
	return params;
}

/*
 * How many rows the executor is to make at most.  Of a query two, since the
 * second is one too many; but SPI applies it to every statement there is, and
 * what the others return is of no interest.
 */
static uint64
row_limit(List *statements)
{
	RawStmt    *first = linitial_node(RawStmt, statements);

	return list_length(statements) == 1 && IsA(first->stmt, SelectStmt) ? 2 : 0;
}

/* Runs the command; its value comes back in the given memory context. */
static void
run_command(Run *run, const char *command, NullableDatum args, MemoryContext context)
{
	SPIExecuteOptions options = {0};
	List	   *statements;
	int			status;

	SPI_connect();
	statements = pg_parse_query(command);
	if (statements == NIL)
	{
		run->mistake = "command must not be empty";
		run->hint = "Pass an SQL command.";
		SPI_finish();
		return;
	}
	options.params = make_params(args);
	options.tcount = row_limit(statements);
	status = SPI_execute_extended(command, &options);
	if (status < 0)
	{
		run->mistake = "command begins or ends a transaction, or copies from or to the client";
		run->hint = "Leave transactions to the caller of idem_execute().";
	}
	else
		take_value(run);
	if (!run->value.isnull)
	{
		MemoryContext old = MemoryContextSwitchTo(context);

		run->value.value = datumCopy(run->value.value, false, -1);
		MemoryContextSwitchTo(old);
	}
	SPI_finish();
}

static void
push_string(JsonbParseState **state, const char *key, const char *value)
{
	JsonbValue	v;

	v.type = jbvString;
	v.val.string.val = unconstify(char *, key);
	v.val.string.len = strlen(key);
	pushJsonbValue(state, WJB_KEY, &v);
	if (value == NULL)
		v.type = jbvNull;
	else
	{
		v.val.string.val = unconstify(char *, value);
		v.val.string.len = strlen(value);
	}
	pushJsonbValue(state, WJB_VALUE, &v);
}

static Datum
error_to_jsonb(const ErrorData *error)
{
	JsonbParseState *state = NULL;

	pushJsonbValue(&state, WJB_BEGIN_OBJECT, NULL);
	push_string(&state, "sqlstate", unpack_sql_state(error->sqlerrcode));
	push_string(&state, "message", error->message);
	push_string(&state, "detail", error->detail);
	push_string(&state, "hint", error->hint);
	return JsonbPGetDatum(JsonbValueToJsonb(pushJsonbValue(&state, WJB_END_OBJECT, NULL)));
}

/* Runs the command in a subtransaction of its own. */
static void
run_isolated(Run *run, const char *command, NullableDatum args)
{
	MemoryContext context = CurrentMemoryContext;
	ResourceOwner owner = CurrentResourceOwner;

	memset(run, 0, sizeof(*run));
	run->value.isnull = true;
	BeginInternalSubTransaction(NULL);
	MemoryContextSwitchTo(context);
	PG_TRY();
	{
		run_command(run, command, args, context);
		ReleaseCurrentSubTransaction();
	}
	PG_CATCH();
	{
		ErrorData  *error;

		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		FlushErrorState();
		RollbackAndReleaseCurrentSubTransaction();
		MemoryContextSwitchTo(context);
		CurrentResourceOwner = owner;
		if (idem_is_transient(error->sqlerrcode))
			ReThrowError(error);
		run->error = error;
		run->value.value = error_to_jsonb(error);
		run->value.isnull = false;
	}
	PG_END_TRY();
	MemoryContextSwitchTo(context);
	CurrentResourceOwner = owner;
}

/* Stores what came of the command, in the claim that the answer is about. */
static void
settle_run(IdemChange *change, const IdemKey *name, const Run *run, IdemAnswer *a)
{
	IdemResult	result = IDEM_NO_RESULT;
	NullableDatum token = {a->values[IDEM_COL_TOKEN - 1], false};
	IdemStatus	status = run->error != NULL ? IDEM_FAILED : IDEM_COMPLETED;

	/* An error that can't be kept is better raised than called too large. */
	result.response = run->value;
	if (run->error != NULL && !idem_size_is_allowed(idem_datum_size(run->value)))
		ReThrowError(run->error);
	idem_check_result(&result);
	idem_begin_change(change, "idem_execute()", *name, IDEM_OWN_CLAIM);
	change->token = token;
	(void) idem_settle(change, status, &result, 0, 0);
	idem_answer(&a->j, run->error != NULL ? IDEM_OUT_FAILED : IDEM_OUT_COMPLETED, NULL);
	a->values = change->values;
	a->nulls = change->nulls;
}

static Datum
make_result(IdemStore *store, const IdemAnswer *a, bool replayed)
{
	Datum		values[IDEM_NEXECUTE];
	bool		nulls[IDEM_NEXECUTE];

	idem_answer_columns(store, a, values, nulls);
	values[IDEM_EXECUTE_REPLAYED] = BoolGetDatum(replayed);
	nulls[IDEM_EXECUTE_REPLAYED] = false;
	return HeapTupleGetDatum(heap_form_tuple(store->table->execute_desc, values, nulls));
}

/*
 * idem_execute(key text, command text, args jsonb, scope text, operation text,
 *				ttl interval, wait interval, ignore text[]) -> one row
 *
 * Claims the key, runs the command with $1 = args, and stores its value as the
 * result, or its error as a final failure; a later caller gets that without
 * the command being run.  args is also the request that is compared, less the
 * paths in ignore.  wait: how long to wait at most while somebody else is at
 * it; null: as long as it takes, as a row lock is waited for.  The command has
 * the caller's rights and search_path.
 *
 * Errors: IK400, IK413, 25006, 42501; 40P01 where it closes a cycle of waits;
 * the command's own of classes 08, 40, 53, 57, 58, XX and 55P03, which say
 * nothing about the request.  Nothing is kept then.
 */
PG_FUNCTION_INFO_V1(idem_execute);
Datum
idem_execute(PG_FUNCTION_ARGS)
{
	IdemKey		name = idem_arg_key(fcinfo, 0, 3);
	char	   *command;
	NullableDatum args = fcinfo->args[2];
	ArrayType  *ignore = NULL;
	IdemRequest request = {0};
	IdemStore	store;
	IdemAnswer	answer;
	IdemChange	change;
	Run			run;
	int64		wait;
	Datum		result;

	if (PG_ARGISNULL(1))
		idem_bad_null("command", "Pass an SQL command.");
	command = text_to_cstring(PG_GETARG_TEXT_PP(1));
	request.operation = idem_arg_name(fcinfo, 4, "operation");
	request.ttl = idem_arg_ttl(fcinfo, 5);
	request.lease = idem_default_lease * INT64CONST(1000);
	request.takeover = true;
	wait = PG_ARGISNULL(6) ? IDEM_FOREVER : idem_arg_wait(fcinfo, 6);
	if (!PG_ARGISNULL(7))
		ignore = PG_GETARG_ARRAYTYPE_P(7);
	if (!args.isnull)
		request.hash = idem_fingerprint_of(DatumGetJsonbP(args.value), ignore);
	else if (ignore != NULL)
		idem_check_ignore(ignore);

	idem_claim_waiting(&store, &name, &request, wait, "idem_execute()", &answer);
	idem_check_result_type(fcinfo, store.table->execute_desc);
	if (answer.j.outcome != IDEM_OUT_CLAIMED)
	{
		result = make_result(&store, &answer, answer.j.outcome == IDEM_OUT_COMPLETED ||
							 answer.j.outcome == IDEM_OUT_FAILED);
		idem_close(&store);
		PG_RETURN_DATUM(result);
	}
	idem_close(&store);

	run_isolated(&run, command, args);
	if (run.mistake != NULL)
		ereport(ERROR,
				(errcode(IDEM_ERRCODE_BAD_INPUT),
				 errmsg("%s", run.mistake),
				 errhint("%s", run.hint)));
	settle_run(&change, &name, &run, &answer);
	result = make_result(&change.store, &answer, false);
	PG_RETURN_DATUM(idem_finish_change(&change, result));
}
