# Rows 39 and 40: open a file at random, read all of it, close it.

set $dir=/tmp
set $nfiles=1000000
set $filesize=4k
set $iosize=4k
set $dirwidth=1000
set $nthreads=1
set $ops=4000000
set $which=cvar(type=cvar-uniform,parameters=lower:0;upper:4000000000)

define fileset name=data,path=$dir,entries=$nfiles,size=$filesize,dirwidth=$dirwidth,dirgamma=0,prealloc

define process name=reader,instances=1
{
  thread name=reader,instances=$nthreads
  {
    flowop openfile name=open,filesetname=data,indexed=$which,fd=1
    flowop readwholefile name=read,fd=1,iosize=$iosize
    flowop closefile name=close,fd=1
    flowop finishoncount name=finish,value=$ops
  }
}

create files
psrun -10
