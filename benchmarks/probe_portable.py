"""time every tile"""
import os, sys, time, itertools
from concurrent.futures import ProcessPoolExecutor
import torch
from torch import Tensor
import qcut.ops
from qcut.codebooks import layout, products
from qcut.portable import triton as rt, codebook as cb, int8 as i8

def prune(op,m):
    pass
SHAPES=[(14336,4096),(4096,14336),(4096,4096)]
def graph_us(call, copies, reps=20):
    s=torch.cuda.Stream(); 
    with torch.cuda.stream(s):
        call(0); torch.cuda.synchronize()
        g=torch.cuda.CUDAGraph()
        g.capture_begin()
        for i in range(reps): call(i%copies)
        g.capture_end()
        g.replay(); torch.cuda.synchronize()
        best=[]
        for _ in range(3):
            a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
            a.record(); g.replay(); b.record(); b.synchronize(); best.append(a.elapsed_time(b)/reps*1e3)
    return sorted(best)[1]
class MT(Tensor): pass
def codebook_case(m,n,k,dt,copies,bits=4,row_norm=False):
    T,U=layout.row_tiles(n),k//128
    out=[]
    for c in range(copies):
        units=torch.randint(0,256,(T,U,layout.unit_bytes(bits)),dtype=torch.uint8,device="cuda")
        norms=torch.rand(T,U,1,8,2,device="cuda").half()
        fold=torch.full((16*T,),100.,device="cuda") if dt is torch.int8 else None
        x=(torch.randint(-127,128,(k//128,(m+7)//8,8,128),device="cuda").to(torch.int8) if dt is torch.int8 else torch.randn(k//64,(m+7)//8,8,64,device="cuda").to(dt)) if c==0 else out[0][0]
        rs=torch.rand(m,device="cuda") if dt is torch.int8 else None
        out.append((x,rs,m,units,norms,fold,torch.rand(n,device="cuda"),None,))
    vals=torch.linspace(-2.5,2.6,16)
    book=products.pack_book(vals, torch.float16 if dt is torch.int8 else dt)
    return [a[:7]+(book,torch.zeros(n,device="cuda"),bits,"none",None,torch.float16 if dt is torch.int8 else dt,True,row_norm) for a in out]
def linear_case(m,n,k,dt,copies):
    out=[]
    for c in range(copies):
        out.append((torch.randint(-127,128,(m,k),device="cuda").to(torch.int8) if dt is torch.int8 else torch.randn(m,k,device="cuda").to(dt), torch.randint(-127,128,(n,k),dtype=torch.int8,device="cuda"), torch.rand(n,device="cuda"), torch.zeros(n,device="cuda"), "none", torch.float16))
    return out
CASES=[("cb",torch.float16,False),("cb",torch.int8,True),("cb",torch.int8,False),("i8",torch.int8,False),("i8",torch.float16,False)]
T=cb.Tile
I=i8.Tile
def tiles(kind,m,dt):
    if kind=="cb":
        base=list(cb.tiles_of(m))
        r=8 if m<=8 else 16 if m<=16 else 32 if m<=32 else 64
        if m<=16: base+=[T(r,32,4,True,4,3),T(r,64,1,True,4,5),T(r,128,1,True,8,4),T(r,32,2,True,2,4),T(64,64,1,False,4,4),T(64,32,2,False,4,3),T(64,128,1,False,8,3)]
        elif m<=256: base+=[] if m>64 else [T(r,128,1,True,8,3),T(r,64,1,False,4,3)]
        else: base+=[T(128,256,1,False,8,2),T(256,64,1,False,8,3),T(128,128,1,False,8,2),T(128,128,1,False,4,2)]+([T(128,256,1,False,8,3),T(256,128,1,False,8,4)] if dt is torch.int8 else [])
    else:
        base=list(i8.tiles_of(m,dt is torch.int8))
        if m<=16: base+=[I(16,64,256,True,4,3),I(16,64,256,True,4,4),I(16,128,128,True,4,4),I(64,32,256,False,4,4),I(64,64,256,False,4,3)]
        elif m<=256: base+=[] if m>64 else [I(64,64,256,True,8,3)]
        elif dt is torch.int8: base+=[I(128,256,128,False,8,4),I(256,128,128,False,8,3,boxes=True)]
        else: base+=[I(128,128,64,True,4,4,boxes=True),I(128,128,128,True,4,3),I(128,256,128,True,8,2)]
    return list(dict.fromkeys(base))
MS=[1,8,64,128,4096]
def force(tile):
    def lb(key,ts,launch,device): launch(tile)
    rt.launch_best=lb
def run_one(kind,dt,row_norm,m,n,k,tile,case,warm=False):
    force(tile)
    if kind=="cb":
        from qcut.ops.codebook import CodebookGemm
        call=lambda i: cb._multiply(CodebookGemm(*case[i]))
    else:
        def call(i):
            x,w,cs,b,act,out=case[i]
            return i8.product(x,w,cs,b,act,out,row_scale=None if dt is not torch.int8 else torch_rs(m))
    if warm:
        call(0); return None
    return graph_us(call,len(case),20 if m<256 else 6)
_rs={}
def torch_rs(m):
    if m not in _rs: _rs[m]=torch.rand(m,device="cuda")
    return _rs[m]
def work(job):
    import triton
    triton.runtime.jit.JITFunction.__getitem__=lambda self,grid:(lambda *a,**k:self.run(*a,grid=grid,warmup=True,**k))
    kind,dt,rn,m,tile=job
    n,k=512,512
    case=codebook_case(m,n,k,dt,1,row_norm=rn) if kind=="cb" else linear_case(m,n,k,dt,1)
    try:
        t=time.time(); run_one(kind,dt,rn,m,n,k,tile,case,True); torch.cuda.synchronize(); return f"{kind} {dt} {m} {tile} {time.time()-t:.1f}s"
    except Exception as e: return f"{kind} {dt} {m} {tile} FAIL {str(e)[:200]}"
def jobs():
    seen=set(); out=[]
    for m in MS:
        for kind,dt,rn in CASES:
            for tile in tiles(kind,m,dt):
                if (kind,dt,rn,tile) not in seen: seen.add((kind,dt,rn,tile)); out.append((kind,dt,rn,m,tile))
    return out
if __name__=="__main__":
    if sys.argv[1]=="warm":
        import multiprocessing as mp
        with mp.get_context("spawn").Pool(int(sys.argv[2])) as p:
            for r in p.imap_unordered(work,jobs(),chunksize=2): print(r,flush=True)
    else:
        end=time.time()+float(sys.argv[2])
        for m,k in ((1,4096),(1,14336),(8,4096),(4096,4096),(4096,14336)):
            x=torch.randn(m,k,device="cuda").half()
            from qcut.codebooks import tokens
            from qcut.ops.codebook import RotateTokens
            ops=tokens.operands("hadamard",128,k,[1],torch.float16,"cuda")
            a=graph_us(lambda i: cb._rotate(RotateTokens(x,ops,"hadamard",128,[1],torch.float16)),1)
            b=graph_us(lambda i: cb._rotate(RotateTokens(x,ops,"hadamard",128,[1],torch.int8)),1)
            c=graph_us(lambda i: i8.quantized_rows(x,k),1); d=graph_us(lambda i: i8.quantized_by(x,.1,3,k),1)
            print(f"tokens m{m} k{k}: halves {a:.1f} int8 {b:.1f} rows {c:.1f} static {d:.1f}",flush=True)
        for m in MS[::-1] if len(sys.argv)>3 else MS:
          for kind,dt,rn in CASES:
            for n,k in (SHAPES[:2] if m<100 else SHAPES[:1]):
                nbytes=n*k//(2 if kind=="cb" else 1)
                copies=1 if m>100 else max(1,min(10,(150<<20)//nbytes))
                try: case=codebook_case(m,n,k,dt,copies,row_norm=rn) if kind=="cb" else linear_case(m,n,k,dt,copies)
                except Exception as e: print("CASE",e); continue
                res=[]
                for tile in tiles(kind,m,dt):
                    if time.time()>end: print("out of time"); sys.exit()
                    try: us=run_one(kind,dt,rn,m,n,k,tile,case); res.append(us)
                    except Exception as e: res.append(float("nan")); print(" !",tile,str(e)[:150].replace("\n"," ")); torch.cuda.synchronize()
                best=min((r for r in res if r==r),default=float("nan"))
                print(f"{kind} {str(dt)[6:]} rn{int(rn)} m{m} {n}x{k}: best {best:.1f}us {2*m*n*k/best/1e6:.0f}TOPS {nbytes/best/1e3:.0f}GB/s | "+" ".join(f"{r:.1f}" for r in res),flush=True)
                del case; torch.cuda.empty_cache()
