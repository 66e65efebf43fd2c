"""python .whl/latent.py : decode and prefill configurations over latents on this GPU."""
import sys,torch,itertools
from nanovllm.kernels.attention.spec import AttentionSpec
from nanovllm.kernels.attention.decode import DecodeScratch
from nanovllm.kernels.attention.decode_plan import DecodeConfig
from nanovllm.kernels.attention.prefill import PrefillConfig
from nanovllm.kernels.latent import decode as D, prefill as P
dev=torch.device("cuda"); PAGE=128
def graph_time(f,reps=20):
    f(); torch.cuda.synchronize()
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(4): f()
    for _ in range(3): g.replay()
    best=1e9
    for _ in range(3):
        a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True); a.record()
        for _ in range(reps): g.replay()
        b.record(); torch.cuda.synchronize(); best=min(best,a.elapsed_time(b)/reps/4*1000)
    return best
def case(rows,ctx,heads):
    blocks=rows*(-(-ctx//PAGE)); cache=torch.randn(blocks,1,PAGE,576,device=dev,dtype=torch.bfloat16)
    table=torch.randperm(blocks,device=dev).int().view(rows,-1).contiguous()
    return cache,table
def ref(q,cache,table,ctx,scale):
    k=cache[table.long()].flatten(1,3)[:,:ctx].float()
    s=torch.einsum("rhd,rkd->rhk",q.float(),k)*scale
    return torch.einsum("rhk,rkd->rhd",s.softmax(-1),k[...,:512])
def decode():
    for heads,(rows,ctx) in itertools.product((16,20,64,128),((1,1024),(1,16384),(4,4096),(16,2048),(64,1024),(256,1024),(256,300))):
        if heads in (64,128) and rows*ctx>70000: continue
        cache,table=case(rows,ctx,heads); q=torch.randn(rows,heads,576,device=dev,dtype=torch.bfloat16); out=torch.empty(rows,heads,512,device=dev,dtype=torch.bfloat16)
        slot=torch.arange(rows,device=dev).int(); lens=torch.full((rows,),ctx,device=dev).int(); spec=AttentionSpec(heads,1,576,.07,value_dim=512)
        want=ref(q,cache,table,ctx,.07) if rows*ctx<=70000 else None
        res=[]
        for bn,w,st,pps,chunk,splits in itertools.product((32,64),(4,8),(3,4),(1,2),(64,128,256,512,1024),(16,32,128)):
            if (w==4 and (heads>16 or bn==64)) or (bn==64 and st==4): continue
            if chunk*splits<ctx and splits!=128: continue
            if splits!=16 and rows>=64: continue
            if chunk<256 and rows>=64 or chunk>512 and rows<16: continue
            if splits==16 and rows==1: continue
            n=min(splits,-(-ctx//chunk))
            cfg=DecodeConfig(block_n=bn,num_warps=w,num_stages=st,programs_per_sm=pps,min_chunk=chunk,max_splits=splits,merge_heads=1 if rows<=4 else 8)
            try:
                plan=D.LatentPlan(1,576,None,max(rows,16),max(ctx,table.shape[1]*PAGE),dev,cfg); d=D.LatentDecode(spec,PAGE,plan,DecodeScratch.for_specs({spec:plan},dev))
                plan.make(slot,lens,rows); f=lambda: d(q,cache,table,ctx,out)
                f(); torch.cuda.synchronize()
                if want is not None:
                    e=((out.float()-want).norm()/want.norm()).item(); assert e<1e-2,e
                res.append((graph_time(f,5 if rows*ctx>50000 else 10),bn,w,st,pps,chunk,splits))
            except Exception as ex: res.append((1e9,bn,w,st,pps,chunk,splits,str(ex)[:60]))
        res.sort(key=lambda r:r[0]); limit=rows*ctx*1152/4.8e6
        ok=[r for r in res if r[0]<1e8]
        print(f"decode heads {heads} rows {rows} ctx {ctx} limit {limit:.1f}us | "+" | ".join(f"{r[0]:.1f} n{r[1]} w{r[2]} s{r[3]} p{r[4]} c{r[5]} x{r[6]}" for r in ok[:4])+f" | worst {ok[-1][0]:.1f} | bad {len(res)-len(ok)} {[r[7] for r in res if r[0]>1e8][:1]}",flush=True)
def prefill():
    for heads,T,ctx in ((20,4096,4096),(20,512,8192),(128,1024,1024)):
        cache,table=case(1,ctx,heads); q=torch.randn(T,heads,576,device=dev,dtype=torch.bfloat16)*.3; out=torch.empty(T,heads,512,device=dev,dtype=torch.bfloat16)
        spec=AttentionSpec(heads,1,576,.07,value_dim=512); line=[]
        for m,n,w,s in ((64,32,8,2),(64,32,8,3),(64,32,8,4),(64,64,8,2),(32,32,4,3),(32,64,8,3)):
            try:
                p=P.LatentPrefill(spec,PAGE,16,dev,PrefillConfig(m,n,num_warps=w,num_stages=s))
                cu=torch.tensor([0,T],device=dev).int(); cl=torch.tensor([ctx],device=dev).int(); sl=torch.zeros(1,device=dev).int()
                tiles=p.plan(cu,cl,T); f=lambda: p.attend(q,cache,table,sl,cu,cl,tiles,out); f()
                k=cache[table[0].long()].flatten(0,2)[:ctx].float(); i=T-1
                sc=(q[i].float()@k.T*.07).softmax(-1)@k[:,:512]; e=((out[i].float()-sc).norm()/sc.norm()).item(); assert e<1e-2,e
                t=graph_time(f,3); line.append(f"{m}x{n} w{w} s{s}: {t:.0f}us {heads*2*(576+512)*(T*ctx-T*T/2)/t/1e6:.0f}TF")
            except Exception as ex: line.append(f"{m}x{n} w{w} s{s}: {str(ex)[:50]}")
        print("prefill",heads,T,ctx," | ".join(line),flush=True)
if __name__=="__main__":
    prefill(); decode()
