#include <stddef.h>
#include <stdint.h>
#include "kernels.h"
static inline __attribute__((optimize("O3"),target("avx2"))) void mean2f(float *a, float *b, size_t n, float d){ if(d==2){for(size_t i=0;i<n;i++){float m=(a[i]+b[i])*0.5f; a[i]=m; b[i]=m;} return;} for(size_t i=0;i<n;i++){float m=(a[i]+b[i])/d; a[i]=m; b[i]=m;}}
static inline __attribute__((optimize("O3"),target("avx2"))) void mean_in_place(int e, char **bufs, size_t ranks, size_t first, size_t count, double d)
{
  if(e==0 && ranks==2){ mean2f((float*)bufs[0]+first,(float*)bufs[1]+first,count,(float)d); return; }
  enum {B=1024}; 
  if(e==1){ double acc[B]; for(size_t s=0;s<count;s+=B){ size_t n=count-s<B?count-s:B; for(size_t i=0;i<n;i++) acc[i]=((double*)bufs[0])[first+s+i]; for(size_t r=1;r<ranks;r++) for(size_t i=0;i<n;i++) acc[i]+=((double*)bufs[r])[first+s+i]; for(size_t i=0;i<n;i++) acc[i]/=d; for(size_t r=0;r<ranks;r++) for(size_t i=0;i<n;i++) ((double*)bufs[r])[first+s+i]=acc[i]; } return; }
  float acc[B], w[B]; float df=(float)d;
  for(size_t s=0;s<count;s+=B){ size_t n=count-s<B?count-s:B;
    for(size_t r=0;r<ranks;r++){ float *src=w; if(e==0) src=(float*)bufs[r]+first+s; else if(e==2) mpiddp_widen_float16(w,(uint16_t*)bufs[r]+first+s,n); else mpiddp_widen_bfloat16(w,(uint16_t*)bufs[r]+first+s,n);
      if(r==0) for(size_t i=0;i<n;i++) acc[i]=src[i]; else for(size_t i=0;i<n;i++) acc[i]+=src[i]; }
    for(size_t r=0;r<ranks;r++){ if(e==0) mpiddp_mean_float32((float*)bufs[r]+first+s,acc,n,d); else if(e==2) mpiddp_mean_to_float16((uint16_t*)bufs[r]+first+s,acc,n,d); else mpiddp_mean_to_bfloat16((uint16_t*)bufs[r]+first+s,acc,n,d);} }
  (void)df;
}
