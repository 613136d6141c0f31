/*-------------------------------------------------------------------------
 *
 * compat.h
 *	  Every test of the server's version, each with the change it answers.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_COMPAT_H
#define IDEM_COMPAT_H

#include "postgres.h"

#include "access/genam.h"
#include "access/tableam.h"
#include "catalog/pg_namespace.h"
#include "commands/trigger.h"
#include "datatype/timestamp.h"
#include "executor/executor.h"
#include "utils/acl.h"
#include "utils/guc.h"
#include "utils/guc_tables.h"
#include "utils/wait_event.h"

#if PG_VERSION_NUM < 140000
#error "idempotency needs PostgreSQL 14 or later"
#endif

/* 15 reserves a prefix for good; 14 can only warn about what is unknown now. */
#if PG_VERSION_NUM >= 150000
#define idem_reserve_prefix(prefix) MarkGUCPrefixReserved(prefix)
#else
#define idem_reserve_prefix(prefix) EmitWarningsOnPlaceholders(prefix)
#endif

/* 16 looks a setting up by name for anybody. */
#if PG_VERSION_NUM >= 160000
static inline struct config_generic *
idem_find_setting(const char *name)
{
	return find_option(name, false, true, 0);
}
#else
static inline struct config_generic *
idem_find_setting(const char *name)
{
	struct config_generic **settings = get_guc_variables();

	for (int i = 0; i < GetNumConfigOptions(); i++)
		if (pg_strcasecmp(settings[i]->name, name) == 0)
			return settings[i];
	return NULL;
}
#endif

/* 15 wants shared memory to be asked for in a hook. */
#if PG_VERSION_NUM >= 150000
#define IDEM_HAS_SHMEM_REQUEST_HOOK
#endif

/* 15 has random numbers of a process's own.  Zero or more, below one. */
#if PG_VERSION_NUM >= 150000
#include "common/pg_prng.h"
#define idem_random_fraction() pg_prng_double(&pg_global_prng_state)
#else
#define idem_random_fraction() (random() / 2147483648.0)
#endif

/* 15 tells why a digest could not be computed. */
#if PG_VERSION_NUM >= 150000
#define idem_hash_error(context) pg_cryptohash_error(context)
#else
#define idem_hash_error(context) "the cryptographic library failed"
#endif

/* 15 added the partitions that a row moves between to the AFTER triggers. */
#if PG_VERSION_NUM >= 150000
#define idem_after_update_triggers(estate, rri, tid, slot, recheck) \
	ExecARUpdateTriggers(estate, rri, NULL, NULL, tid, NULL, slot, recheck, NULL, false)
#define idem_after_delete_triggers(estate, rri, tid) \
	ExecARDeleteTriggers(estate, rri, tid, NULL, NULL, false)
#else
#define idem_after_update_triggers(estate, rri, tid, slot, recheck) \
	ExecARUpdateTriggers(estate, rri, tid, NULL, slot, recheck, NULL)
#define idem_after_delete_triggers(estate, rri, tid) \
	ExecARDeleteTriggers(estate, rri, tid, NULL, NULL)
#endif

/* 16 has one function for the privileges on any kind of object. */
#if PG_VERSION_NUM >= 160000
#define idem_schema_needs_usage(schema, role) \
	(object_aclcheck(NamespaceRelationId, schema, role, ACL_USAGE) != ACLCHECK_OK)
#else
#define idem_schema_needs_usage(schema, role) \
	(pg_namespace_aclcheck(schema, role, ACL_USAGE) != ACLCHECK_OK)
#endif

/* 16 lets an update touch the summarizing (BRIN) indexes alone. */
#if PG_VERSION_NUM >= 160000
typedef TU_UpdateIndexes IdemUpdateIndexes;
#define idem_insert_index_tuples(rri, slot, estate, update, nodup, conflict, arbiters, which) \
	ExecInsertIndexTuples(rri, slot, estate, update, nodup, conflict, arbiters, \
						  (which) == TU_Summarizing)
#define IDEM_ALL_INDEXES TU_All
#define IDEM_NO_INDEXES TU_None
#else
typedef bool IdemUpdateIndexes;
#define idem_insert_index_tuples(rri, slot, estate, update, nodup, conflict, arbiters, which) \
	ExecInsertIndexTuples(rri, slot, estate, update, nodup, conflict, arbiters)
#define IDEM_ALL_INDEXES true
#define IDEM_NO_INDEXES false
#endif

/* 17 knows infinite intervals. */
#if PG_VERSION_NUM >= 170000
#define idem_interval_is_infinite(i) INTERVAL_NOT_FINITE(i)
#define idem_interval_is_forever(i) INTERVAL_IS_NOEND(i)
#else
#define idem_interval_is_infinite(i) false
#define idem_interval_is_forever(i) false
#endif

/* 17 lets an extension name its wait events. */
#if PG_VERSION_NUM >= 170000
#define idem_wait_event_new(name) WaitEventExtensionNew(name)
#else
#define idem_wait_event_new(name) PG_WAIT_EXTENSION
#endif

/* 18 counts index searches for EXPLAIN. */
#if PG_VERSION_NUM >= 180000
#define idem_index_beginscan(heap, index, snapshot, nkeys) \
	index_beginscan(heap, index, snapshot, NULL, nkeys, 0)
#else
#define idem_index_beginscan(heap, index, snapshot, nkeys) \
	index_beginscan(heap, index, snapshot, nkeys, 0)
#endif

#endif							/* IDEM_COMPAT_H */
