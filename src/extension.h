/*-------------------------------------------------------------------------
 *
 * extension.h
 *	  Where the extension's objects are in this database, kept until they
 *	  change.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_EXTENSION_H
#define IDEM_EXTENSION_H

#include "idempotency.h"

#include "access/tupdesc.h"
#include "fmgr.h"
#include "storage/lockdefs.h"
#include "utils/relcache.h"

/*
 * The columns of idempotency_keys, in the install script's order;
 * extension.c checks names and types against it.
 */
typedef enum IdemColumn
{
	IDEM_COL_CREATED_AT = 1,
	IDEM_COL_CLAIMED_AT,
	IDEM_COL_TOKEN,
	IDEM_COL_DUE_AT,
	IDEM_COL_TTL,
	IDEM_COL_ATTEMPT,
	IDEM_COL_TAKEOVER,
	IDEM_COL_SCOPE,
	IDEM_COL_KEY,
	IDEM_COL_OPERATION,
	IDEM_COL_REQUEST_HASH,
	IDEM_COL_STATUS,
	IDEM_COL_LEASE_UNTIL,
	IDEM_COL_EXPIRES_AT,
	IDEM_COL_COMPLETED_AT,
	IDEM_COL_RETRY_AT,
	IDEM_COL_HTTP_STATUS,
	IDEM_COL_CHECKPOINT,
	IDEM_COL_STATE,
	IDEM_COL_HEADERS,
	IDEM_COL_RESPONSE,
	IDEM_COL_BODY,
	IDEM_COL_RESOLVED_BY,
	IDEM_COL_NOTE,
	IDEM_NCOLUMNS = IDEM_COL_NOTE
} IdemColumn;

/* The columns of idem_claim_result, counted from zero. */
typedef enum IdemClaimColumn
{
	IDEM_CLAIM_OUTCOME,
	IDEM_CLAIM_TOKEN,
	IDEM_CLAIM_ATTEMPT,
	IDEM_CLAIM_HTTP_STATUS,
	IDEM_CLAIM_HEADERS,
	IDEM_CLAIM_RESPONSE,
	IDEM_CLAIM_BODY,
	IDEM_CLAIM_CHECKPOINT,
	IDEM_CLAIM_STATE,
	IDEM_CLAIM_CREATED_AT,
	IDEM_CLAIM_COMPLETED_AT,
	IDEM_CLAIM_EXPIRES_AT,
	IDEM_CLAIM_RETRY_AFTER,
	IDEM_NCLAIM,

	/* What idem_execute_result has after them. */
	IDEM_EXECUTE_REPLAYED = IDEM_NCLAIM,
	IDEM_NEXECUTE
} IdemClaimColumn;

typedef struct IdemTable
{
	Oid			schema;
	Oid			relid;
	Oid			pkey;			/* index on (scope, key) */
	Oid			due_index;		/* index on (due_at), if it is there */
	Oid			sequence;
	bool		foreign_code;	/* writes may run code that isn't ours */
	Oid			status[IDEM_NSTATUS];	/* enum values */
	Oid			outcome[IDEM_NOUTCOME];
	Oid			disposition[IDEM_NDISPOSITION];
	TupleDesc	claim_desc;		/* idem_claim_result */
	TupleDesc	execute_desc;	/* idem_execute_result */
} IdemTable;

extern void idem_extension_init(void);
extern uint64 idem_extension_changes(void);
extern bool idem_find_extension(Oid *extension, Oid *schema);
extern const IdemTable *idem_open_table(LOCKMODE lockmode, bool wait, Relation *rel);
extern void idem_check_result_type(FunctionCallInfo fcinfo, TupleDesc desc);
extern const char *idem_status_name(IdemStatus status);
extern IdemStatus idem_status_of(const IdemTable *table, Oid value);
extern IdemDisposition idem_disposition_of(const IdemTable *table, Oid value);

#endif							/* IDEM_EXTENSION_H */
