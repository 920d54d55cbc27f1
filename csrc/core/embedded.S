// The kernel sets of this build: manifest.json and images.bin, as read-only data.
#ifdef __APPLE__
#define SYMBOL(name) _##name
.section __DATA,__const
#else
#define SYMBOL(name) name
.section .rodata, "a"
#endif

.macro embed begin, end, file
  .globl \begin
  .globl \end
  .balign 64
\begin:
  .incbin "\file"
\end:
.endm

embed SYMBOL(atlas_manifest_begin), SYMBOL(atlas_manifest_end), manifest.json
embed SYMBOL(atlas_images_begin), SYMBOL(atlas_images_end), images.bin
  .byte 0

#if defined(__linux__) && defined(__ELF__)
.section .note.GNU-stack, "", %progbits
#endif
