/*-------------------------------------------------------------------------
 *
 * names.c
 *	  idem_key and idem_uuid: names made from names.
 *
 * Both depend on their arguments alone, and different arguments never give
 * the same name: idem_key escapes the separator, idem_uuid hashes the scope's
 * length along.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "common/sha1.h"
#include "fmgr.h"
#include "lib/stringinfo.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/uuid.h"

#include "args.h"
#include "hash.h"

/* The namespace of idem_uuid: 794d6e52-8004-4d0d-8979-8872ea81aa61. */
static const uint8 uuid_namespace[UUID_LEN] = {
	0x79, 0x4d, 0x6e, 0x52, 0x80, 0x04, 0x4d, 0x0d,
	0x89, 0x79, 0x88, 0x72, 0xea, 0x81, 0xaa, 0x61
};

static void
bad_parts(const char *message)
{
	ereport(ERROR,
			(errcode(IDEM_ERRCODE_BAD_INPUT),
			 errmsg("%s", message),
			 errhint("Pass the parts of the key, as in idem_key('order-123', 'ChargePayment').")));
}

/*
 * idem_key(VARIADIC parts text[]) -> text
 *
 * The parts joined by ':'; a ':' or '\' within a part is preceded by a '\'.
 *
 * Errors: IK400 for no parts or a null one.
 */
PG_FUNCTION_INFO_V1(idem_key);
Datum
idem_key(PG_FUNCTION_ARGS)
{
	StringInfoData key;
	Datum	   *parts;
	bool	   *nulls;
	int			nparts = 0;

	if (!PG_ARGISNULL(0))
		deconstruct_array(PG_GETARG_ARRAYTYPE_P(0), TEXTOID, -1, false, TYPALIGN_INT,
						  &parts, &nulls, &nparts);
	if (nparts == 0)
		bad_parts("a key needs at least one part");

	initStringInfo(&key);
	for (int i = 0; i < nparts; i++)
	{
		text	   *part;
		const char *p;
		const char *end;

		if (nulls[i])
			bad_parts("a part of a key must not be null");
		if (i > 0)
			appendStringInfoChar(&key, ':');

		/* Safe bytewise: in no server encoding is ':' or '\' part of a character. */
		part = DatumGetTextPP(parts[i]);
		end = VARDATA_ANY(part) + VARSIZE_ANY_EXHDR(part);
		for (p = VARDATA_ANY(part); p < end; p++)
		{
			if (*p == ':' || *p == '\\')
				appendStringInfoChar(&key, '\\');
			appendStringInfoChar(&key, *p);
		}
	}
	PG_RETURN_TEXT_P(cstring_to_text_with_len(key.data, key.len));
}

static void
hash_text(IdemHash *hash, const text *value, bool with_length)
{
	Size		len;
	char	   *utf8 = idem_utf8(VARDATA_ANY(value), VARSIZE_ANY_EXHDR(value), &len);

	if (with_length)
	{
		char		prefix[32];

		idem_hash_bytes(hash, prefix, snprintf(prefix, sizeof(prefix), "%zu:", len));
	}
	idem_hash_bytes(hash, utf8, len);
}

/*
 * idem_uuid(key text, scope text) -> uuid
 *
 * RFC 9562 version 5 (SHA-1) of the name "{bytes of scope}:{scope}{key}" in
 * UTF-8, in a namespace of our own.  The setting idempotency.scope plays no
 * part.
 *
 * Errors: IK400.
 */
PG_FUNCTION_INFO_V1(idem_uuid);
Datum
idem_uuid(PG_FUNCTION_ARGS)
{
	text	   *key = idem_arg_name(fcinfo, 0, "idempotency key");
	text	   *scope = idem_arg_name(fcinfo, 1, "scope");
	pg_uuid_t  *uuid = palloc(sizeof(pg_uuid_t));
	uint8		digest[SHA1_DIGEST_LENGTH];
	IdemHash	hash;

	if (VARSIZE_ANY_EXHDR(key) == 0)
		ereport(ERROR,
				(errcode(IDEM_ERRCODE_BAD_INPUT),
				 errmsg("idempotency key must not be empty"),
				 errhint("Pass the key that the UUID is to stand for.")));

	idem_hash_begin(&hash, PG_SHA1);
	idem_hash_bytes(&hash, uuid_namespace, UUID_LEN);
	hash_text(&hash, scope, true);
	hash_text(&hash, key, false);
	idem_hash_end(&hash, digest, sizeof(digest));

	memcpy(uuid->data, digest, UUID_LEN);
	uuid->data[6] = (uuid->data[6] & 0x0f) | 0x50;	/* version 5 */
	uuid->data[8] = (uuid->data[8] & 0x3f) | 0x80;	/* variant of RFC 9562 */
	PG_RETURN_UUID_P(uuid);
}
