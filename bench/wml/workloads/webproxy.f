# A web proxy with the default sizes of Filebench's personality, in one
# directory: a page is replaced and logged for every five that are read.

set $dir=/tmp
set $nfiles=10000
set $filesize=cvar(type=cvar-gamma,parameters=mean:16384;gamma:1.5)
set $dirwidth=1000000
set $nthreads=100
set $iosize=1m
set $appendsize=16k
set $seconds=60

define fileset name=data,path=$dir,entries=$nfiles,size=$filesize,dirwidth=$dirwidth,dirgamma=0,prealloc=80
define file name=log,path=$dir,size=16k,prealloc

define process name=proxy,instances=1
{
  thread name=worker,memsize=10m,instances=$nthreads
  {
    flowop deletefile name=delete,filesetname=data
    flowop createfile name=create,filesetname=data,fd=1
    flowop appendfilerand name=append,iosize=$appendsize,fd=1
    flowop closefile name=close-new,fd=1
    flowop openfile name=open1,filesetname=data,fd=1
    flowop readwholefile name=read1,fd=1,iosize=$iosize
    flowop closefile name=close1,fd=1
    flowop openfile name=open2,filesetname=data,fd=1
    flowop readwholefile name=read2,fd=1,iosize=$iosize
    flowop closefile name=close2,fd=1
    flowop openfile name=open3,filesetname=data,fd=1
    flowop readwholefile name=read3,fd=1,iosize=$iosize
    flowop closefile name=close3,fd=1
    flowop openfile name=open4,filesetname=data,fd=1
    flowop readwholefile name=read4,fd=1,iosize=$iosize
    flowop closefile name=close4,fd=1
    flowop openfile name=open5,filesetname=data,fd=1
    flowop readwholefile name=read5,fd=1,iosize=$iosize
    flowop closefile name=close5,fd=1
    flowop appendfilerand name=append-log,filesetname=log,iosize=$appendsize,fd=2
  }
}

create files
run $seconds
