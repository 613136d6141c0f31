/*-------------------------------------------------------------------------
 *
 * args.h
 *	  Reading and checking the arguments of the SQL functions.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_ARGS_H
#define IDEM_ARGS_H

#include "idempotency.h"

#include "fmgr.h"

#define IDEM_MAX_NAME	255		/* characters in a key, scope or operation */

/* A result as the caller gave it, still toasted where it was. */
typedef struct IdemResult
{
	NullableDatum http_status;
	NullableDatum headers;
	NullableDatum response;
	NullableDatum body;
} IdemResult;

#define IDEM_NO_RESULT {{0, true}, {0, true}, {0, true}, {0, true}}

extern bool idem_is_writable(void);
extern void idem_require_writable(const char *function);
extern void idem_bad_null(const char *what, const char *hint);
extern IdemKey idem_arg_key(FunctionCallInfo fcinfo, int key_arg, int scope_arg);
extern text *idem_arg_name(FunctionCallInfo fcinfo, int arg, const char *what);
extern text *idem_arg_scope(FunctionCallInfo fcinfo, int arg);
extern text *idem_check_key(NullableDatum value);
extern bytea *idem_arg_hash(FunctionCallInfo fcinfo, int arg);
extern bool idem_arg_bool(FunctionCallInfo fcinfo, int arg, const char *what);

/* Durations are in microseconds. */
extern int64 idem_arg_ttl(FunctionCallInfo fcinfo, int arg);
extern int64 idem_arg_lease(FunctionCallInfo fcinfo, int arg);
extern int64 idem_arg_duration(FunctionCallInfo fcinfo, int arg, const char *what, bool zero_ok);
extern int64 idem_arg_wait(FunctionCallInfo fcinfo, int arg);
extern TimestampTz idem_later(TimestampTz from, int64 duration);
extern Datum idem_make_interval(int64 duration);

#define IDEM_FOREVER PG_INT64_MAX

extern bool idem_interval_duration(const Interval *interval, int64 *duration);

extern void idem_check_result(const IdemResult *result);
extern bool idem_size_is_allowed(Size size);
extern void idem_check_size(Size size, const char *what);
extern Size idem_datum_size(NullableDatum value);

#endif							/* IDEM_ARGS_H */
