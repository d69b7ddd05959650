# Rows 29 to 36: writes at random offsets of one file. $writes is for each thread.

set $dir=/tmp
set $filesize=60g
set $nthreads=1
set $iosize=4k
set $writes=1572864

set mode quit alldone

define fileset name=data,path=$dir,entries=1,size=$filesize,dirwidth=1,dirgamma=0,prealloc
define fileset name=nothing,path=$dir,entries=1,size=0,dirwidth=1,dirgamma=0

define process name=writer,instances=1
{
  thread name=writer,instances=$nthreads
  {
    flowop openfile name=open,filesetname=data,fd=1
    flowop write name=write,fd=1,random,iosize=$iosize,iters=$writes
    flowop closefile name=close,fd=1
    flowop statfile name=end,filesetname=nothing
  }
}

create files
psrun -10
