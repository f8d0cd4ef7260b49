# PCRE2 and utf8proc from the sources of the distribution's packages, for systems that have no packages of them:
# desks.mk, dist.mk and web.mk compile them.
SOURCES     := build/library-sources
PCRE2_PARTS := auto_possess chartables compile config context error extuni find_bracket jit_compile maketables match match_data \
               newline ord2utf pattern_info script_run serialize string_utils study substring tables ucd valid_utf xclass
PCRE2_FLAGS := -DHAVE_CONFIG_H -DPCRE2_CODE_UNIT_WIDTH=8 -DPCRE2_STATIC -DSUPPORT_PCRE2_8 -DSUPPORT_UNICODE -DHAVE_MEMMOVE \
               -DHAVE_STDINT_H -DHAVE_INTTYPES_H -I$(SOURCES)/pcre2/src

$(SOURCES)/ready: tools/library_sources.py
	@'$(PYTHON)' $< $(@D)
	@mkdir -p $(@D)/include
	@cd $(@D)/pcre2/src && cp pcre2.h.generic pcre2.h && cp config.h.generic config.h && \
	    cp pcre2_chartables.c.dist pcre2_chartables.c && cp pcre2.h ../../utf8proc/utf8proc.h ../../include
	@touch $@
