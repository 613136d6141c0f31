# idempotency: PGXS build.  "make", "make install", "make installcheck" with any PG_CONFIG.

EXTENSION = idempotency
MODULE_big = idempotency
DATA = $(wildcard sql/idempotency--*.sql)

OBJS = $(patsubst %.c,%.o,$(sort $(wildcard src/*.c)))

REGRESS = $(sort $(patsubst test/sql/%.sql,%,$(wildcard test/sql/*.sql)))
REGRESS_OPTS = --inputdir=test --load-extension=idempotency
ISOLATION = $(sort $(patsubst test/isolation/specs/%.spec,%,$(wildcard test/isolation/specs/*.spec)))
ISOLATION_OPTS = --inputdir=test/isolation --load-extension=idempotency
TAP_TESTS = 1
PROVE_TESTS = $(wildcard test/t/*.pl)

PG_CFLAGS = -Wall -Wextra -Wno-unused-parameter -Wno-sign-compare -Wno-missing-field-initializers

# PGXS knows no header dependencies; the compiler writes them as it goes.
PG_CFLAGS += -MMD -MP
DEPENDENCIES = $(OBJS:.o=.d)

EXTRA_CLEAN = $(DEPENDENCIES) results output_iso regression.diffs regression.out \
	test/isolation/results test/isolation/output_iso tmp_check tmp_check_iso log

PG_CONFIG ?= pg_config
PGXS := $(shell $(PG_CONFIG) --pgxs)
include $(PGXS)

-include $(DEPENDENCIES)
$(OBJS:.o=.bc): %.bc: %.o
