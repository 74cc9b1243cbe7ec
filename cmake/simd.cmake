# One translation unit per ISA. A file's own flags, and its own inline namespace so that header code compiled for AVX-512
# never serves a baseline caller.
string(REPLACE ";" "," SAMPLEX_SANITIZE_TEXT "${SAMPLEX_SANITIZE}")
set(SAMPLEX_X86_SIMD OFF)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(SAMPLEX_X86_SIMD ON)
endif()

function(samplex_add_simd_sources target level sources)
  if(NOT SAMPLEX_X86_SIMD OR NOT sources)
    return()
  endif()
  if(level EQUAL 2)
    set(flags -mavx2 -mfma -mf16c)
    set(ns avx2)
  else()
    # GCC 12 warns about its own _mm512_undefined intrinsics.
    set(flags -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c -Wno-maybe-uninitialized -Wno-uninitialized)
    set(ns avx512)
  endif()
  target_sources(${target} PRIVATE ${sources})
  set_source_files_properties(${sources} PROPERTIES COMPILE_OPTIONS "${flags}" COMPILE_DEFINITIONS "SX_ISA_NS=${ns}")
  target_compile_definitions(${target} PRIVATE SAMPLEX_X86_SIMD)
endfunction()
