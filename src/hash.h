/*-------------------------------------------------------------------------
 *
 * hash.h
 *	  A cryptographic digest, computed piece by piece.
 *
 *-------------------------------------------------------------------------
 */
#ifndef IDEM_HASH_H
#define IDEM_HASH_H

#include "postgres.h"

#include "common/cryptohash.h"

typedef struct IdemHash
{
	pg_cryptohash_ctx *context;
	Size		used;
	uint8		buffer[1024];
} IdemHash;

extern void idem_hash_begin(IdemHash *hash, pg_cryptohash_type type);
extern void idem_hash_overflow(IdemHash *hash, const void *bytes, Size len);
extern void idem_hash_end(IdemHash *hash, uint8 *digest, Size len);

/* A digest is made of many small pieces, so these two are worth inlining. */
static inline void
idem_hash_bytes(IdemHash *hash, const void *bytes, Size len)
{
	if (unlikely(len > sizeof(hash->buffer) - hash->used))
	{
		idem_hash_overflow(hash, bytes, len);
		return;
	}
	memcpy(hash->buffer + hash->used, bytes, len);
	hash->used += len;
}

static inline void
idem_hash_byte(IdemHash *hash, uint8 byte)
{
	if (unlikely(hash->used == sizeof(hash->buffer)))
		idem_hash_overflow(hash, &byte, 1);
	else
		hash->buffer[hash->used++] = byte;
}

extern char *idem_utf8(const char *bytes, Size len, Size *utf8_len);

#endif							/* IDEM_HASH_H */
