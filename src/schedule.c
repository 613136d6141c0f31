/*-------------------------------------------------------------------------
 *
 * schedule.c
 *	  idem_schedule and idem_unschedule: sweeping by pg_cron.
 *
 * What pg_cron is told goes through its own SQL functions, as the caller, so
 * its privileges and its errors apply.  Its schema is always "cron".  A job is
 * known by its name, which says what database it sweeps; pg_cron has one job
 * of a name for each user and changes it when it is scheduled again.
 *
 * The command is the one CALL: pg_cron runs a job of several statements as one
 * transaction, in which idem_sweep_all() could not commit.  So it has to name
 * the procedure's schema outright, and for another database, whose catalogs
 * can't be read from here, that is the schema of this one.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/dependency.h"
#include "catalog/namespace.h"
#include "catalog/pg_database.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "commands/dbcommands.h"
#include "commands/extension.h"
#include "common/hashfn.h"
#include "executor/spi.h"
#include "fmgr.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "utils/builtins.h"
#include "utils/catcache.h"
#include "utils/lsyscache.h"
#include "utils/syscache.h"

#include "args.h"
#include "compat.h"
#include "extension.h"

#define CRON			"pg_cron"
#define CRON_HOME		"cron.database_name"
#define CRON_NEWEST_NEED "schedule_in_database"	/* since pg_cron 1.4 */
#define JOB_PREFIX		"idempotency sweep "

/* Is there a function of that name, whatever its arguments, that is pg_cron's? */
static bool
cron_has_function(Oid extension, const char *name)
{
	CatCList   *list = SearchSysCacheList1(PROCNAMEARGSNSP, CStringGetDatum(name));
	bool		found = false;

	for (int i = 0; i < list->n_members && !found; i++)
	{
		Form_pg_proc proc = (Form_pg_proc) GETSTRUCT(&list->members[i]->tuple);

		found = getExtensionOfObject(ProcedureRelationId, proc->oid) == extension;
	}
	ReleaseSysCacheList(list);
	return found;
}

/* Raises an error unless pg_cron can be called in this database. */
static void
require_cron(const char *function)
{
	const struct config_generic *setting = idem_find_setting(CRON_HOME);
	const char *home;
	Oid			extension;

	if (setting == NULL || (setting->flags & GUC_CUSTOM_PLACEHOLDER))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("%s needs extension \"%s\", which this server does not run", function, CRON),
				 errhint("Install pg_cron, add it to shared_preload_libraries and restart the server; "
						 "or call idem_sweep_all() from another scheduler.")));

	home = GetConfigOption(CRON_HOME, true, false);
	if (home == NULL || strcmp(home, get_database_name(MyDatabaseId)) != 0)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("%s must be called in pg_cron's database \"%s\"", function,
						home != NULL ? home : ""),
				 errhint("Connect to that database, create extension \"%s\" there, and name this one in the argument \"database\".",
						 IDEM_EXTENSION)));

	extension = get_extension_oid(CRON, true);
	if (!OidIsValid(extension))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_OBJECT),
				 errmsg("extension \"%s\" is not installed in this database", CRON),
				 errhint("Run CREATE EXTENSION %s.", CRON)));
	if (!cron_has_function(extension, CRON_NEWEST_NEED))
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("extension \"%s\" is too old for %s", CRON, function),
				 errhint("It has to be version 1.4 or later: install that, and run ALTER EXTENSION %s UPDATE.",
						 CRON)));
}

static const char *
arg_database(FunctionCallInfo fcinfo, int arg)
{
	return PG_ARGISNULL(arg) ? get_database_name(MyDatabaseId) : NameStr(*PG_GETARG_NAME(arg));
}

/* A job that could only fail is none. */
static void
require_database(const char *name)
{
	HeapTuple	tuple = SearchSysCache1(DATABASEOID, ObjectIdGetDatum(get_database_oid(name, true)));
	bool		open;

	if (!HeapTupleIsValid(tuple))
		ereport(ERROR,
				(errcode(ERRCODE_UNDEFINED_DATABASE),
				 errmsg("database \"%s\" does not exist", name),
				 errhint("Pass the name of a database of this server that has extension \"%s\".",
						 IDEM_EXTENSION)));
	open = ((Form_pg_database) GETSTRUCT(tuple))->datallowconn;
	ReleaseSysCache(tuple);
	if (!open)
		ereport(ERROR,
				(errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
				 errmsg("database \"%s\" is not accepting connections", name),
				 errhint("Run ALTER DATABASE ... ALLOW_CONNECTIONS true first.")));
}

/* Up to 1.4 the name has the length of an identifier, the database's own has it too. */
static char *
job_name(const char *database)
{
	int			room = NAMEDATALEN - 1 - (int) strlen(JOB_PREFIX);
	int			len = (int) strlen(database);

	if (len <= room)
		return psprintf("%s%s", JOB_PREFIX, database);
	return psprintf("%s%.*s~%08x", JOB_PREFIX, pg_mbcliplen(database, len, room - 9), database,
					hash_bytes((const unsigned char *) database, len));
}

static char *
sweep_command(void)
{
	Oid			extension;
	Oid			schema;

	if (!idem_find_extension(&extension, &schema))
		elog(ERROR, "extension \"%s\" is not installed", IDEM_EXTENSION);
	return psprintf("CALL %s()",
					quote_qualified_identifier(get_namespace_name(schema), "idem_sweep_all"));
}

/* What to do about an error of pg_cron's, which come without. */
static const char *
hint_for(int sqlstate)
{
	if (sqlstate == ERRCODE_INVALID_PARAMETER_VALUE)
		return "A schedule has five fields, as in '0 * * * *', or with pg_cron 1.5 and later is like '30 seconds'.";
	if (sqlstate == ERRCODE_INSUFFICIENT_PRIVILEGE)
		return "A superuser has to grant USAGE on schema \"cron\" and, for another database, EXECUTE on function cron.schedule_in_database().";
	return NULL;
}

/* Runs a query with arguments of type text; its first value, or NULL without a row. */
static NullableDatum
run(const char *query, int nargs, const char *const *args)
{
	Oid			types[4];
	Datum		values[4];
	NullableDatum result = {0, true};

	Assert(nargs <= lengthof(types));
	for (int i = 0; i < nargs; i++)
	{
		types[i] = TEXTOID;
		values[i] = CStringGetTextDatum(args[i]);
	}
	if (SPI_execute_with_args(query, nargs, types, values, NULL, false, 0) != SPI_OK_SELECT)
		elog(ERROR, "could not execute \"%s\"", query);
	if (SPI_processed > 0)
		result.value = SPI_getbinval(SPI_tuptable->vals[0], SPI_tuptable->tupdesc, 1,
									 &result.isnull);
	return result;
}

/* The same, and what pg_cron refuses comes with a hint. */
static NullableDatum
run_with_hint(const char *query, int nargs, const char *const *args)
{
	MemoryContext context = CurrentMemoryContext;
	NullableDatum result;

	PG_TRY();
	{
		result = run(query, nargs, args);
	}
	PG_CATCH();
	{
		ErrorData  *error;
		const char *hint;

		MemoryContextSwitchTo(context);
		error = CopyErrorData();
		FlushErrorState();
		hint = hint_for(error->sqlerrcode);
		if (error->hint == NULL && hint != NULL)
			error->hint = pstrdup(hint);
		ReThrowError(error);
	}
	PG_END_TRY();
	return result;
}

/*
 * idem_schedule(schedule text, database name) -> bigint
 *
 * Makes pg_cron sweep the database (default: this one) on that schedule, or
 * changes the caller's job that does, and returns the job's id.
 *
 * Errors: IK400 for a null schedule; 55000 where pg_cron isn't loaded, is too
 * old or at home in another database, or the database allows no connections;
 * 42704 where it has not been created;
 * 3D000 for a database that doesn't exist; 25006, 42501; 22023 and others as
 * pg_cron raises them.
 */
PG_FUNCTION_INFO_V1(idem_schedule);
Datum
idem_schedule(PG_FUNCTION_ARGS)
{
	const char *args[4];
	int			nargs = 3;
	const char *query = "SELECT cron.schedule($1, $2, $3)";
	NullableDatum job;

	if (PG_ARGISNULL(0))
		idem_bad_null("schedule", "Pass a schedule as cron has it, as in '0 * * * *'.");
	idem_require_writable("idem_schedule()");
	require_cron("idem_schedule()");

	args[3] = arg_database(fcinfo, 1);
	require_database(args[3]);
	args[0] = job_name(args[3]);
	args[1] = text_to_cstring(PG_GETARG_TEXT_PP(0));
	args[2] = sweep_command();
	if (strcmp(args[3], get_database_name(MyDatabaseId)) != 0)
	{
		/* This one is for those whom an administrator lets have it. */
		query = "SELECT cron.schedule_in_database($1, $2, $3, $4)";
		nargs = 4;
	}

	SPI_connect();
	job = run_with_hint(query, nargs, args);
	SPI_finish();
	if (job.isnull)
		elog(ERROR, "pg_cron has returned no job");
	PG_RETURN_DATUM(job.value);
}

/*
 * idem_unschedule(database name) -> boolean
 *
 * Removes the caller's job for the database (default: this one), which need
 * not exist any more.  False if there was none.
 *
 * Errors: as idem_schedule, but 3D000.
 */
PG_FUNCTION_INFO_V1(idem_unschedule);
Datum
idem_unschedule(PG_FUNCTION_ARGS)
{
	const char *args[1];
	NullableDatum removed;

	idem_require_writable("idem_unschedule()");
	require_cron("idem_unschedule()");
	args[0] = job_name(arg_database(fcinfo, 0));

	SPI_connect();
	removed = run_with_hint("SELECT cron.unschedule(jobid) FROM cron.job"
				  " WHERE jobname OPERATOR(pg_catalog.=) $1"
				  " AND username OPERATOR(pg_catalog.=) CURRENT_USER", 1, args);
	SPI_finish();
	PG_RETURN_BOOL(!removed.isnull && DatumGetBool(removed.value));
}
