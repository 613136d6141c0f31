/*-------------------------------------------------------------------------
 *
 * shared.c
 *	  The extension's parts of shared memory.
 *
 * A part is a struct of fixed size that the file it belongs to asks for while
 * the library is preloaded.  Without preload there is none, and its pointer
 * stays NULL.  After a crash the memory is new, and set up again.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include "miscadmin.h"
#include "storage/ipc.h"
#include "storage/lwlock.h"
#include "storage/shmem.h"

#include "compat.h"
#include "shared.h"

typedef struct Part
{
	const char *name;
	Size		size;
	IdemSharedInit init;
	void	  **place;
} Part;

static Part parts[4];
static int	nparts = 0;

#ifdef IDEM_HAS_SHMEM_REQUEST_HOOK
static shmem_request_hook_type next_request_hook = NULL;
#endif
static shmem_startup_hook_type next_startup_hook = NULL;

/* To be called before idem_shared_init(). */
void
idem_shared_add(const char *name, Size size, IdemSharedInit init, void **place)
{
	if (nparts == lengthof(parts))
		elog(ERROR, "too many parts of shared memory");
	parts[nparts].name = name;
	parts[nparts].size = size;
	parts[nparts].init = init;
	parts[nparts++].place = place;
}

static void
request(void)
{
#ifdef IDEM_HAS_SHMEM_REQUEST_HOOK
	if (next_request_hook != NULL)
		next_request_hook();
#endif
	for (int i = 0; i < nparts; i++)
		RequestAddinShmemSpace(parts[i].size);
}

static void
startup(void)
{
	if (next_startup_hook != NULL)
		next_startup_hook();

	LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
	for (int i = 0; i < nparts; i++)
	{
		bool		found;

		*parts[i].place = ShmemInitStruct(parts[i].name, parts[i].size, &found);
		if (!found)
			parts[i].init(*parts[i].place);
	}
	LWLockRelease(AddinShmemInitLock);
}

void
idem_shared_init(void)
{
	if (!process_shared_preload_libraries_in_progress)
		return;
#ifdef IDEM_HAS_SHMEM_REQUEST_HOOK
	next_request_hook = shmem_request_hook;
	shmem_request_hook = request;
#else
	request();
#endif
	next_startup_hook = shmem_startup_hook;
	shmem_startup_hook = startup;
}
