# Row 45: pages are read, ten for each line in one log.

set $dir=/tmp
set $nfiles=1250000
set $filesize=16k
set $dirwidth=20
set $nthreads=100
set $iosize=1m
set $appendsize=16k
set $ops=8000000

define fileset name=data,path=$dir,entries=$nfiles,size=$filesize,dirwidth=$dirwidth,prealloc
define file name=log,path=$dir,size=16k,prealloc

define process name=server,instances=1
{
  thread name=worker,memsize=10m,instances=$nthreads
  {
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
    flowop openfile name=open6,filesetname=data,fd=1
    flowop readwholefile name=read6,fd=1,iosize=$iosize
    flowop closefile name=close6,fd=1
    flowop openfile name=open7,filesetname=data,fd=1
    flowop readwholefile name=read7,fd=1,iosize=$iosize
    flowop closefile name=close7,fd=1
    flowop openfile name=open8,filesetname=data,fd=1
    flowop readwholefile name=read8,fd=1,iosize=$iosize
    flowop closefile name=close8,fd=1
    flowop openfile name=open9,filesetname=data,fd=1
    flowop readwholefile name=read9,fd=1,iosize=$iosize
    flowop closefile name=close9,fd=1
    flowop openfile name=open10,filesetname=data,fd=1
    flowop readwholefile name=read10,fd=1,iosize=$iosize
    flowop closefile name=close10,fd=1
    flowop appendfilerand name=append-log,filesetname=log,iosize=$appendsize,fd=2
    flowop finishoncount name=finish,value=$ops
  }
}

create files
psrun -10
