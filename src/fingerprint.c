/*-------------------------------------------------------------------------
 *
 * fingerprint.c
 *	  idem_fingerprint: SHA-256 of a request's canonical form.
 *
 * Two requests that are equal as jsonb have the same canonical form, and no
 * others do.  The bytes of a jsonb value are no such form (1.0 and 1.00 differ
 * there, and the order of keys depends on the database's encoding), nor is its
 * text.  Ours gives each value a tag, and each string its length in bytes of
 * UTF-8, so that no two values can run into each other:
 *
 *		z null, t true, f false
 *		n number: sign, weight, number of digits and the digits, base 10000
 *		  with no trailing zeros, as numeric_send() gives them, less the scale
 *		s string: length, bytes
 *		[ elements ]
 *		{ key, value ... }	keys in the order of their length, then bytes
 *
 * The integers of a number are of 16 bits, big-endian; a length is written in
 * groups of 7 bits, the lowest first, each but the last with its high bit set
 * (LEB128), so that hashing has less to do.  The first byte of a fingerprint is the version of
 * this algorithm; one that changes it gets a new number.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "catalog/pg_type.h"
#include "common/sha2.h"
#include "fmgr.h"
#include "mb/pg_wchar.h"
#include "miscadmin.h"
#include "port/pg_bswap.h"
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"

#include "args.h"
#include "fingerprint.h"
#include "hash.h"
#include "idempotency.h"

#define FINGERPRINT_VERSION 1

/* A path that is left out: names of members, from the outermost in. */
typedef struct Path
{
	int			nsteps;
	char	  **steps;			/* in the database's encoding */
} Path;

typedef struct Fingerprinter
{
	IdemHash	hash;
	bool		reorder;		/* keys are stored in another order */
	Path	   *paths;
	int			npaths;
} Fingerprinter;

/* A member of an object, with its key in UTF-8. */
typedef struct Member
{
	char	   *key;
	Size		len;
	const JsonbValue *name;
	JsonbValue	value;
} Member;

static void add_container(Fingerprinter *f, JsonbContainer *container, int depth,
						  const bool *on_path);

static void
add_length(Fingerprinter *f, Size len)
{
	for (; len >= 0x80; len >>= 7)
		idem_hash_byte(&f->hash, (len & 0x7f) | 0x80);
	idem_hash_byte(&f->hash, len);
}

static void
add_string(Fingerprinter *f, const char *bytes, Size len)
{
	Size		utf8_len;
	char	   *utf8 = idem_utf8(bytes, len, &utf8_len);

	idem_hash_byte(&f->hash, 's');
	add_length(f, utf8_len);
	idem_hash_bytes(&f->hash, utf8, utf8_len);
	if (utf8 != bytes)
		pfree(utf8);
}

/* numeric_send(): ndigits, weight, sign, dscale, digits; all of 16 bits. */
static void
add_number(Fingerprinter *f, Numeric number)
{
	bytea	   *wire = DatumGetByteaP(DirectFunctionCall1(numeric_send, NumericGetDatum(number)));
	uint16	   *words = (uint16 *) VARDATA(wire);
	uint16		ndigits = pg_ntoh16(words[0]);
	uint16		n;

	/* Stored numbers have none, but nothing says that they may not. */
	while (ndigits > 0 && words[3 + ndigits] == 0)
		ndigits--;

	n = pg_hton16(ndigits);
	idem_hash_byte(&f->hash, 'n');
	idem_hash_bytes(&f->hash, &words[2], sizeof(uint16));
	idem_hash_bytes(&f->hash, &words[1], sizeof(uint16));
	idem_hash_bytes(&f->hash, &n, sizeof(n));
	idem_hash_bytes(&f->hash, &words[4], ndigits * sizeof(uint16));
	pfree(wire);
}

static void
add_value(Fingerprinter *f, JsonbValue *value, int depth, const bool *on_path)
{
	switch (value->type)
	{
		case jbvNull:
			idem_hash_byte(&f->hash, 'z');
			break;
		case jbvBool:
			idem_hash_byte(&f->hash, value->val.boolean ? 't' : 'f');
			break;
		case jbvNumeric:
			add_number(f, value->val.numeric);
			break;
		case jbvString:
			add_string(f, value->val.string.val, value->val.string.len);
			break;
		case jbvBinary:
			add_container(f, value->val.binary.data, depth, on_path);
			break;
		default:
			elog(ERROR, "unexpected jsonb value type %d", (int) value->type);
	}
}

static bool
is_step(const Path *path, int depth, const JsonbValue *name)
{
	const char *step = path->steps[depth];

	return strlen(step) == name->val.string.len &&
		memcmp(step, name->val.string.val, name->val.string.len) == 0;
}

static void
add_member(Fingerprinter *f, const JsonbValue *name, JsonbValue *value, int depth,
		   const bool *on_path)
{
	bool	   *on_path_inside = NULL;

	if (on_path != NULL)
	{
		on_path_inside = palloc(f->npaths * sizeof(bool));
		for (int i = 0; i < f->npaths; i++)
		{
			const Path *path = &f->paths[i];

			on_path_inside[i] = on_path[i] && depth < path->nsteps && is_step(path, depth, name);
			if (on_path_inside[i] && depth == path->nsteps - 1)
			{
				pfree(on_path_inside);
				return;			/* left out */
			}
		}
	}

	add_string(f, name->val.string.val, name->val.string.len);
	add_value(f, value, depth + 1, on_path_inside);
	if (on_path_inside != NULL)
		pfree(on_path_inside);
}

static int
compare_members(const void *a, const void *b)
{
	const Member *ma = (const Member *) a;
	const Member *mb = (const Member *) b;

	if (ma->len != mb->len)
		return ma->len < mb->len ? -1 : 1;
	return memcmp(ma->key, mb->key, ma->len);
}

/*
 * jsonb keeps keys by length, then bytes, in the database's encoding; in
 * another one than UTF-8 they have to be put in order again.
 */
static void
add_members_reordered(Fingerprinter *f, JsonbContainer *container, int depth,
					  const bool *on_path)
{
	uint32		count = JsonContainerSize(container);
	Member	   *members = palloc(count * sizeof(Member));
	JsonbValue *names = palloc(count * sizeof(JsonbValue));
	JsonbIterator *it = JsonbIteratorInit(container);
	JsonbValue	v;
	JsonbIteratorToken token;
	uint32		n = 0;

	while ((token = JsonbIteratorNext(&it, &v, true)) != WJB_DONE)
	{
		if (token == WJB_KEY)
		{
			names[n] = v;
			members[n].name = &names[n];
			members[n].key = idem_utf8(v.val.string.val, v.val.string.len, &members[n].len);
		}
		else if (token == WJB_VALUE)
			members[n++].value = v;
	}
	qsort(members, n, sizeof(Member), compare_members);
	for (uint32 i = 0; i < n; i++)
		add_member(f, members[i].name, &members[i].value, depth, on_path);
	pfree(members);
	pfree(names);
}

/* An array or an object; a bare value is stored as an array of itself. */
static void
add_container(Fingerprinter *f, JsonbContainer *container, int depth, const bool *on_path)
{
	JsonbIterator *it;
	JsonbValue	v;
	JsonbValue	name = {0};
	JsonbIteratorToken token;

	check_stack_depth();
	CHECK_FOR_INTERRUPTS();

	if (JsonContainerIsObject(container) && f->reorder)
	{
		idem_hash_byte(&f->hash, '{');
		add_members_reordered(f, container, depth, on_path);
		idem_hash_byte(&f->hash, '}');
		return;
	}

	it = JsonbIteratorInit(container);
	while ((token = JsonbIteratorNext(&it, &v, true)) != WJB_DONE)
	{
		switch (token)
		{
			case WJB_BEGIN_ARRAY:
				if (!JsonContainerIsScalar(container))
					idem_hash_byte(&f->hash, '[');
				break;
			case WJB_END_ARRAY:
				if (!JsonContainerIsScalar(container))
					idem_hash_byte(&f->hash, ']');
				break;
			case WJB_BEGIN_OBJECT:
				idem_hash_byte(&f->hash, '{');
				break;
			case WJB_END_OBJECT:
				idem_hash_byte(&f->hash, '}');
				break;
			case WJB_ELEM:
				add_value(f, &v, depth, on_path);
				break;
			case WJB_KEY:
				name = v;
				break;
			case WJB_VALUE:
				add_member(f, &name, &v, depth, on_path);
				break;
			default:
				break;
		}
	}
}

static void
bad_path(const char *detail)
{
	ereport(ERROR,
			(errcode(IDEM_ERRCODE_BAD_INPUT),
			 errmsg("invalid path in argument \"ignore\""),
			 errdetail("%s", detail),
			 errhint("Name members from the outermost in, joined by dots, as in '{ts,client.trace_id}'; "
					 "a dot or backslash within a name is preceded by a backslash.")));
}

/* Splits "client.trace_id" at the dots that no backslash precedes. */
static Path
parse_path(const char *text)
{
	Path		path = {0, palloc((strlen(text) + 1) * sizeof(char *))};
	char	   *out = palloc(strlen(text) + 1);

	path.steps[path.nsteps++] = out;
	for (const char *p = text; *p != '\0'; p++)
	{
		if (*p == '.')
		{
			*out++ = '\0';
			path.steps[path.nsteps++] = out;
			continue;
		}
		if (*p == '\\' && *++p == '\0')
			bad_path("It ends in a backslash.");
		*out++ = *p;
	}
	*out = '\0';
	return path;
}

static void
parse_ignore(Fingerprinter *f, ArrayType *ignore)
{
	Datum	   *elems;
	bool	   *nulls;

	deconstruct_array(ignore, TEXTOID, -1, false, TYPALIGN_INT, &elems, &nulls, &f->npaths);
	f->paths = palloc(f->npaths * sizeof(Path));
	for (int i = 0; i < f->npaths; i++)
	{
		if (nulls[i])
			bad_path("It is null.");
		f->paths[i] = parse_path(TextDatumGetCString(elems[i]));
	}
}

/* Raises IK400 for an invalid path. */
void
idem_check_ignore(ArrayType *ignore)
{
	Fingerprinter f;

	parse_ignore(&f, ignore);
}

bytea *
idem_fingerprint_of(Jsonb *request, ArrayType *ignore)
{
	Fingerprinter f;
	bool	   *on_path = NULL;
	bytea	   *result = palloc(VARHDRSZ + 1 + PG_SHA256_DIGEST_LENGTH);

	f.reorder = GetDatabaseEncoding() != PG_UTF8 && GetDatabaseEncoding() != PG_SQL_ASCII;
	f.npaths = 0;
	if (ignore != NULL)
		parse_ignore(&f, ignore);
	if (f.npaths > 0)
	{
		on_path = palloc(f.npaths * sizeof(bool));
		memset(on_path, true, f.npaths * sizeof(bool));
	}

	idem_hash_begin(&f.hash, PG_SHA256);
	add_container(&f, &request->root, 0, on_path);

	SET_VARSIZE(result, VARHDRSZ + 1 + PG_SHA256_DIGEST_LENGTH);
	*(uint8 *) VARDATA(result) = FINGERPRINT_VERSION;
	idem_hash_end(&f.hash, (uint8 *) VARDATA(result) + 1, PG_SHA256_DIGEST_LENGTH);
	return result;
}

/*
 * idem_fingerprint(request jsonb, ignore text[]) -> bytea
 *
 * 33 bytes: the algorithm's version, then SHA-256.  Equal if and only if the
 * requests are equal as jsonb, without what ignore names.  A path passes
 * through arrays: items.ts leaves ts out of each element of items.
 *
 * Errors: IK400 for a null request or an invalid path; 54001 for one nested
 * too deeply for max_stack_depth.
 */
PG_FUNCTION_INFO_V1(idem_fingerprint);
Datum
idem_fingerprint(PG_FUNCTION_ARGS)
{
	if (PG_ARGISNULL(0))
		idem_bad_null("request", "Pass the request; for an empty one '{}'.");
	PG_RETURN_BYTEA_P(idem_fingerprint_of(PG_GETARG_JSONB_P(0),
										  PG_ARGISNULL(1) ? NULL : PG_GETARG_ARRAYTYPE_P(1)));
}
