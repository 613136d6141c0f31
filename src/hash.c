/*-------------------------------------------------------------------------
 *
 * hash.c
 *	  A cryptographic digest, computed piece by piece.
 *
 * The contexts of pg_cryptohash belong to a resource owner, which makes one
 * for each call the normal thing and half of a short digest's cost.  Ours are
 * made once a session, under a resource owner that is never released.  Small
 * pieces are gathered in a buffer first, since each call into the library
 * costs more than hashing them does.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/namespace.h"
#include "mb/pg_wchar.h"
#include "utils/memutils.h"
#include "utils/resowner.h"

#include "compat.h"
#include "hash.h"
#include "idempotency.h"

static pg_cryptohash_ctx *contexts[PG_SHA512 + 1];

static pg_cryptohash_ctx *
lasting_context(pg_cryptohash_type type)
{
	static ResourceOwner owner = NULL;
	ResourceOwner save = CurrentResourceOwner;
	MemoryContext save_context = CurrentMemoryContext;

	if (contexts[type] != NULL)
		return contexts[type];

	if (owner == NULL)
		owner = ResourceOwnerCreate(NULL, "idempotency digests");
	CurrentResourceOwner = owner;
	MemoryContextSwitchTo(TopMemoryContext);	/* where there is no OpenSSL */
	PG_TRY();
	{
		contexts[type] = pg_cryptohash_create(type);
	}
	PG_FINALLY();
	{
		CurrentResourceOwner = save;
		MemoryContextSwitchTo(save_context);
	}
	PG_END_TRY();
	return contexts[type];
}

static void
check(IdemHash *hash, int status)
{
	if (status < 0)
		ereport(ERROR,
				(errcode(ERRCODE_INTERNAL_ERROR),
				 errmsg("could not compute digest: %s", idem_hash_error(hash->context))));
}

void
idem_hash_begin(IdemHash *hash, pg_cryptohash_type type)
{
	hash->context = lasting_context(type);
	hash->used = 0;
	check(hash, pg_cryptohash_init(hash->context));
}

static void
flush(IdemHash *hash)
{
	check(hash, pg_cryptohash_update(hash->context, hash->buffer, hash->used));
	hash->used = 0;
}

/* What does not fit into the buffer any more. */
void
idem_hash_overflow(IdemHash *hash, const void *bytes, Size len)
{
	flush(hash);
	if (len > sizeof(hash->buffer))
		check(hash, pg_cryptohash_update(hash->context, bytes, len));
	else
		idem_hash_bytes(hash, bytes, len);
}

void
idem_hash_end(IdemHash *hash, uint8 *digest, Size len)
{
	flush(hash);
	check(hash, pg_cryptohash_final(hash->context, digest, len));
}

/*
 * Text as UTF-8, so that a digest is the same in every database encoding.  In
 * a SQL_ASCII database the bytes are what they are.
 */
char *
idem_utf8(const char *bytes, Size len, Size *utf8_len)
{
	int			encoding = GetDatabaseEncoding();
	Size		size = len * MAX_CONVERSION_GROWTH + 1;
	unsigned char *utf8;
	Oid			conversion;

	*utf8_len = len;
	if (encoding == PG_UTF8 || encoding == PG_SQL_ASCII)
		return unconstify(char *, bytes);

	conversion = FindDefaultConversionProc(encoding, PG_UTF8);
	utf8 = MemoryContextAllocHuge(CurrentMemoryContext, size);
	if (!OidIsValid(conversion) ||
		pg_do_encoding_conversion_buf(conversion, encoding, PG_UTF8, unconstify(unsigned char *, (const unsigned char *) bytes), len,
									  utf8, size, true) < len)
		ereport(ERROR,
				(errcode(IDEM_ERRCODE_BAD_INPUT),
				 errmsg("text to be hashed contains a character that Unicode does not have"),
				 errhint("Leave the character out, or for a request compute \"request_hash\" yourself.")));
	*utf8_len = strlen((char *) utf8);
	return (char *) utf8;
}
