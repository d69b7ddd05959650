# Rows 13 to 20: reads at random offsets of one file. $reads is for each thread.

set $dir=/tmp
set $filesize=60g
set $nthreads=1
set $iosize=4k
set $reads=262144

set mode quit alldone

define fileset name=data,path=$dir,entries=1,size=$filesize,dirwidth=1,dirgamma=0,prealloc
define fileset name=nothing,path=$dir,entries=1,size=0,dirwidth=1,dirgamma=0

define process name=reader,instances=1
{
  thread name=reader,instances=$nthreads
  {
    flowop openfile name=open,filesetname=data,fd=1
    flowop read name=read,fd=1,random,iosize=$iosize,iters=$reads
    flowop closefile name=close,fd=1
    flowop statfile name=end,filesetname=nothing
  }
}

create files
psrun -10
