"""warm"""
import sys, time
import torch
import qcut.ops
from benchmarks import bench_portable as bp
from qcut.codebooks import layout, products, tokens
from qcut.portable import triton as rt, codebook as cb, int8 as i8
from qcut.ops.codebook import CodebookGemm, RotateTokens
CASES=[("cb",torch.float16,4),("cb",torch.int8,4),("i8",torch.int8,8),("i8",torch.float16,8),("cb",torch.float16,3),("cb",torch.float16,2)]
def jobs():
    out=[("rot",None,0,0,None)]
    for m in (16,64,4096):
        for kind,dt,bits in CASES:
            ts=cb.tiles_of(m) if kind=="cb" else i8.tiles_of(m,dt is torch.int8)
            out+= [(kind,dt,bits,m,t) for t in ts]
    return out
def work(job):
    import triton
    triton.runtime.jit.JITFunction.__getitem__=lambda self,grid:(lambda *a,**k:self.run(*a,grid=grid,warmup=True,**k))
    kind,dt,bits,m,tile=job
    t=time.time()
    n,k=512,512
    try:
        if kind=="rot":
            for k,mm in ((4096,8),(14336,8),(4096,128),(14336,128)):
                x=torch.empty(mm,k,device="cuda",dtype=torch.float16)
                ops=torch.zeros(1,k//32,dtype=torch.int32,device="cuda")
                for d in (torch.float16,torch.int8): cb._rotate(RotateTokens(x,ops,"hadamard",128,[1],d))
                i8.quantized_rows(x,k); i8.quantized_by(x,.1,3,k)
            return "rot %.1f"%(time.time()-t)
        def lb(key,ts,launch,device): launch(tile)
        rt.launch_best=lb
        ms={16:(8,1),64:(64,)}.get(m,(m,))
        for mm in ms:
            if kind=="cb":
                T,U=layout.row_tiles(n),k//128
                units=torch.zeros(T,U,layout.unit_bytes(bits),dtype=torch.uint8,device="cuda")
                norms=torch.zeros(T,U,1,8,2,device="cuda").half()
                fold=torch.zeros(16*T,device="cuda") if dt is torch.int8 else None
                per=128 if dt is torch.int8 else 64
                x=torch.zeros(k//per,(mm+7)//8,8,per,device="cuda",dtype=dt)
                rs=torch.zeros(mm,device="cuda") if dt is torch.int8 else None
                book=products.pack_book(torch.linspace(-1,1,16),torch.float16)
                cb._multiply(CodebookGemm(x,rs,mm,units,norms,fold,torch.zeros(n,device="cuda"),book,torch.zeros(n,device="cuda"),bits,"none",None,torch.float16,True,False))
            else:
                x=torch.zeros(mm,k,device="cuda",dtype=dt)
                i8.product(x,torch.zeros(n,k,dtype=torch.int8,device="cuda"),torch.zeros(n,device="cuda"),torch.zeros(n,device="cuda"),"none",torch.float16,row_scale=torch.zeros(mm,device="cuda") if dt is torch.int8 else None)
        return f"{kind} {dt} {bits} {m} {tile} {time.time()-t:.1f}s"
    except Exception as e: return f"{kind} {dt} {bits} {m} {tile} FAIL {str(e)[:300]}"
if __name__=="__main__":
    if sys.argv[1]=="fused":
        from qcut.cuda.prebuild import prebuild
        from qcut.config import parse_scheme
        calls=set()
        for s in bp.SCHEMES:
            sch=parse_scheme(s)
            for n,k in bp.NK:
                for m in (*bp.FEW,*bp.PROMPTS):
                    calls.update(qcut.Linear.subclass_for(sch).cuda_calls(sch,dtype=torch.float16,rows=m,n=n,k=k,bias=True,activation="none"))
        t=time.time(); prebuild(sorted(calls,key=str),0,False); print("fused",len(calls),time.time()-t)
    else:
        import multiprocessing as mp
        with mp.get_context("spawn").Pool(int(sys.argv[2])) as p:
            for r in p.imap_unordered(work,jobs(),chunksize=1): print(r,flush=True)
