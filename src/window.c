/*-------------------------------------------------------------------------
 *
 * window.c
 *	  The time of day in which the worker may sweep.
 *
 * What counts is what a clock on the wall shows in the time zone of the
 * server's setting TimeZone, so nothing has to be computed for the days on
 * which clocks are changed: an hour that is skipped is not swept in, one that
 * comes twice is swept in twice.
 *
 *-------------------------------------------------------------------------
 */
#include "postgres.h"

#include <ctype.h>

#include "fmgr.h"
#include "pgtime.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

#include "window.h"

#define DAY (24 * 60)

static IdemWindow current = {0, 0};

static const char *
skip_blanks(const char *text)
{
	while (isspace((unsigned char) *text))
		text++;
	return text;
}

/* H:MM or HH:MM; NULL if that isn't what stands there. */
static const char *
parse_time(const char *text, int *minute)
{
	int			parts[2];

	for (int i = 0; i < 2; i++)
	{
		const char *begin = text;

		parts[i] = 0;
		while (isdigit((unsigned char) *text) && text - begin < 2)
			parts[i] = parts[i] * 10 + (*text++ - '0');
		if (text == begin || (i == 1 && text - begin != 2))
			return NULL;
		if (i == 0 && *text++ != ':')
			return NULL;
	}
	*minute = parts[0] * 60 + parts[1];
	return parts[1] < 60 && *minute <= DAY ? text : NULL;
}

/* NULL, or what is wrong. */
static const char *
parse_window(const char *text, IdemWindow *window)
{
	const char *not_a_window = "It is not of the form \"HH:MM-HH:MM\", from 00:00 to 23:59 and to 24:00 at most.";

	window->begin = window->end = 0;
	text = skip_blanks(text);
	if (*text == '\0')
		return NULL;

	text = parse_time(text, &window->begin);
	if (text == NULL || window->begin == DAY)
		return not_a_window;
	text = skip_blanks(text);
	if (*text++ != '-')
		return not_a_window;
	text = parse_time(skip_blanks(text), &window->end);
	if (text == NULL || *skip_blanks(text) != '\0')
		return not_a_window;
	if (window->begin == window->end)
		return "It ends when it begins.";
	return NULL;
}

bool
idem_check_window(char **newval, void **extra, GucSource source)
{
	IdemWindow	window;
	const char *wrong = parse_window(*newval, &window);

	if (wrong == NULL)
		return true;
	GUC_check_errdetail("%s", wrong);
	GUC_check_errhint("Give it like \"01:00-05:00\" or, over midnight, \"22:30-06:00\"; leave it empty to sweep at any time.");
	return false;
}

void
idem_assign_window(const char *newval, void *extra)
{
	(void) parse_window(newval, &current);
}

/* How long it is open in a day; 0 if there is no window. */
int
idem_window_minutes(void)
{
	int			length = current.end - current.begin;

	return length < 0 ? length + DAY : length;
}

static bool
is_open(const IdemWindow *window, TimestampTz at, const pg_tz *zone)
{
	pg_time_t	seconds = timestamptz_to_time_t(at);
	struct pg_tm *tm = pg_localtime(&seconds, zone);
	int			minute;

	if (window->begin == window->end || tm == NULL)
		return true;
	minute = tm->tm_hour * 60 + tm->tm_min;
	if (window->begin < window->end)
		return minute >= window->begin && minute < window->end;
	return minute >= window->begin || minute < window->end;
}

bool
idem_window_is_open(TimestampTz at)
{
	return is_open(&current, at, session_timezone);
}

/*
 * idem_window_test(sweep_window text, at timestamptz) -> boolean
 *
 * Whether such a window is open then.  No SQL function is made of it but in
 * the tests.
 */
PG_FUNCTION_INFO_V1(idem_window_test);
Datum
idem_window_test(PG_FUNCTION_ARGS)
{
	IdemWindow	window;
	const char *wrong = parse_window(text_to_cstring(PG_GETARG_TEXT_PP(0)), &window);

	if (wrong != NULL)
		ereport(ERROR,
				(errcode(ERRCODE_INVALID_PARAMETER_VALUE),
				 errmsg("invalid window"),
				 errdetail("%s", wrong)));
	PG_RETURN_BOOL(is_open(&window, PG_GETARG_TIMESTAMPTZ(1), session_timezone));
}
