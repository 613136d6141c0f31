/*-------------------------------------------------------------------------
 *
 * privileges.c
 *	  idem_grant and idem_revoke: who may call what.
 *
 * What an application and an administrator need is listed here once, so that
 * nobody has to keep GRANTs in step with the extension's versions.  The
 * statements run as the caller, who has to own the functions or be allowed to
 * grant them: there is nothing here to gain.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "access/htup_details.h"
#include "catalog/dependency.h"
#include "catalog/pg_proc.h"
#include "executor/spi.h"
#include "fmgr.h"
#include "lib/stringinfo.h"
#include "miscadmin.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/catcache.h"
#include "utils/lsyscache.h"
#include "utils/regproc.h"
#include "utils/syscache.h"

#include "args.h"
#include "compat.h"
#include "extension.h"

static const char *const application_calls[] = {
	"idem_claim", "idem_complete", "idem_fail", "idem_renew", "idem_checkpoint", "idem_get",
	"idem_execute", "idem_once", "idem_once_many", "idem_claim_many", "idem_complete_many",
	"idem_fingerprint", "idem_key", "idem_uuid", NULL
};

static const char *const admin_calls[] = {
	"idem_resolve", "idem_forget", "idem_sweep", "idem_sweep_all", "idem_schedule", "idem_unschedule",
	"idem_start_worker", "idem_stop_worker", "idem_stats", "idem_stats_reset", "idem_summary",
	"idem_health", NULL
};

static const char *const admin_views[] = {"idempotency_stats", "idempotency_summary"};

/*
 * The signature of the extension's own function of that name; somebody may
 * have put another one beside it.
 */
static const char *
signature(Oid extension, Oid schema, const char *name)
{
	CatCList   *list = SearchSysCacheList1(PROCNAMEARGSNSP, CStringGetDatum(name));
	Oid			found = InvalidOid;

	for (int i = 0; i < list->n_members; i++)
	{
		Form_pg_proc proc = (Form_pg_proc) GETSTRUCT(&list->members[i]->tuple);

		if (proc->pronamespace == schema &&
			getExtensionOfObject(ProcedureRelationId, proc->oid) == extension)
			found = proc->oid;
	}
	ReleaseSysCacheList(list);
	if (!OidIsValid(found))
		elog(ERROR, "extension \"%s\" has no function %s", IDEM_EXTENSION, name);
	return format_procedure_qualified(found);
}

static void
append_calls(StringInfo sql, Oid extension, Oid schema, const char *const *names)
{
	for (; *names != NULL; names++)
	{
		if (sql->data[sql->len - 1] != ' ')
			appendStringInfoString(sql, ", ");
		appendStringInfoString(sql, signature(extension, schema, *names));
	}
}

static void
run(const char *sql)
{
	if (SPI_execute(sql, false, 0) != SPI_OK_UTILITY)
		elog(ERROR, "could not execute \"%s\"", sql);
}

static void
change_calls(const char *verb, const char *preposition, Oid extension, Oid schema,
			 const char *role, bool admin)
{
	StringInfoData sql;

	initStringInfo(&sql);
	appendStringInfo(&sql, "%s EXECUTE ON ROUTINE ", verb);
	append_calls(&sql, extension, schema, application_calls);
	if (admin)
		append_calls(&sql, extension, schema, admin_calls);
	appendStringInfo(&sql, " %s %s", preposition, role);
	run(sql.data);
}

static void
change_views(const char *verb, const char *preposition, const char *schema, const char *role)
{
	for (int i = 0; i < lengthof(admin_views); i++)
		run(psprintf("%s SELECT ON TABLE %s %s %s", verb,
					 quote_qualified_identifier(schema, admin_views[i]), preposition, role));
}

static void
change(FunctionCallInfo fcinfo, bool grant, bool admin)
{
	Oid			extension;
	Oid			schema_oid;
	const char *schema;
	const char *role;

	if (PG_ARGISNULL(0))
		idem_bad_null("role", "Pass the name of a role, as in 'app'.");
	if (!idem_find_extension(&extension, &schema_oid))
		elog(ERROR, "extension \"%s\" is not installed", IDEM_EXTENSION);
	schema = get_namespace_name(schema_oid);
	role = quote_identifier(GetUserNameFromId(PG_GETARG_OID(0), false));

	SPI_connect();
	if (grant)
	{
		if (idem_schema_needs_usage(schema_oid, PG_GETARG_OID(0)))
			run(psprintf("GRANT USAGE ON SCHEMA %s TO %s", quote_identifier(schema), role));
		change_calls("GRANT", "TO", extension, schema_oid, role, admin);
		if (admin)
			change_views("GRANT", "TO", schema, role);
	}
	else
	{
		change_calls("REVOKE", "FROM", extension, schema_oid, role, true);
		change_views("REVOKE", "FROM", schema, role);
	}
	SPI_finish();
}

/*
 * idem_grant(role regrole, admin boolean) -> void
 *
 * Lets the role call what an application needs; with admin what resolves,
 * deletes, sweeps and watches too.  Grants USAGE on the extension's schema
 * where the role lacks it.
 *
 * Errors: IK400; 42501 as GRANT raises it.
 */
PG_FUNCTION_INFO_V1(idem_grant);
Datum
idem_grant(PG_FUNCTION_ARGS)
{
	change(fcinfo, true, idem_arg_bool(fcinfo, 1, "admin"));
	PG_RETURN_VOID();
}

/*
 * idem_revoke(role regrole) -> void
 *
 * Takes back all that idem_grant may have given, but USAGE on the schema,
 * which other objects may need.
 *
 * Errors: IK400; 42501 as REVOKE raises it.
 */
PG_FUNCTION_INFO_V1(idem_revoke);
Datum
idem_revoke(PG_FUNCTION_ARGS)
{
	change(fcinfo, false, true);
	PG_RETURN_VOID();
}
