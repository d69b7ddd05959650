# Small operations for the comparison of file systems in the guest: one thread, and every file is made durable.
set $dir=/mnt/small
set $n=300
define fileset name=new,path=$dir,entries=$n,size=1k,dirwidth=100,prealloc=0
define fileset name=old,path=$dir,entries=$n,size=1k,dirwidth=100,prealloc=100
define file name=big,path=$dir,size=16m,prealloc
define process name=p,instances=1 {
  thread name=t,memsize=1m,instances=1 {
    flowop createfile name=create,filesetname=new,fd=1
    flowop write name=write,fd=1,iosize=1k
    flowop fsync name=fsync,fd=1
    flowop closefile name=close,fd=1
    flowop statfile name=stat,filesetname=old
    flowop read name=read,filename=big,random,iosize=4k,directio
    flowop finishoncount name=end,value=$n,target=create
  }
}
run 120
