/*-------------------------------------------------------------------------
 *
 * idempotency.h
 *	  Types and names that every file of the extension shares.
 *
 * Calls run one way: SQL functions (claim.c, settle.c, get.c, ...) -> store
 * (store_read.c, store_write.c) -> extension.c.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEMPOTENCY_H
#define IDEMPOTENCY_H

#include "postgres.h"

#include "datatype/timestamp.h"

#define IDEM_EXTENSION	"idempotency"
#define IDEM_TABLE		"idempotency_keys"
#define IDEM_SEQUENCE	"idempotency_keys_token_seq"

/* The contract's SQLSTATEs; the last three digits are the HTTP status. */
#define IDEM_ERRCODE_BAD_INPUT	MAKE_SQLSTATE('I', 'K', '4', '0', '0')
#define IDEM_ERRCODE_NO_CLAIM	MAKE_SQLSTATE('I', 'K', '4', '0', '4')
#define IDEM_ERRCODE_SETTLED	MAKE_SQLSTATE('I', 'K', '4', '0', '9')
#define IDEM_ERRCODE_LOST		MAKE_SQLSTATE('I', 'K', '4', '1', '0')
#define IDEM_ERRCODE_TOO_LARGE	MAKE_SQLSTATE('I', 'K', '4', '1', '3')

/* In the order of the SQL enum idem_status. */
typedef enum IdemStatus
{
	IDEM_PROCESSING,
	IDEM_COMPLETED,
	IDEM_FAILED,
	IDEM_RETRYABLE,
	IDEM_UNKNOWN,
	IDEM_NSTATUS
} IdemStatus;

/* In the order of the SQL enum idem_outcome. */
typedef enum IdemOutcome
{
	IDEM_OUT_CLAIMED,
	IDEM_OUT_PROCESSING,
	IDEM_OUT_COMPLETED,
	IDEM_OUT_FAILED,
	IDEM_OUT_RETRYABLE,
	IDEM_OUT_UNKNOWN,
	IDEM_OUT_MISMATCH,
	IDEM_NOUTCOME
} IdemOutcome;

/* In the order of the SQL enum idem_disposition. */
typedef enum IdemDisposition
{
	IDEM_FINAL,
	IDEM_RETRY,
	IDEM_HOLD,
	IDEM_NDISPOSITION
} IdemDisposition;

/* A key as the caller named it; the scope is the one that applies to him. */
typedef struct IdemKey
{
	text	   *scope;
	text	   *key;
} IdemKey;

#endif							/* IDEMPOTENCY_H */
