# Rows 1 to 12: each thread reads one file from its beginning to its end.
#
# With one file all threads read the same; with 32 files the rotation gives
# every thread one of its own. The set `nothing` never has a file: the flowop
# that asks for one ends its thread, so that each reads exactly once.

set $dir=/tmp
set $nfiles=1
set $filesize=60g
set $nthreads=1
set $iosize=4k
set $reads=15728640

set mode quit alldone

define fileset name=data,path=$dir,entries=$nfiles,size=$filesize,dirwidth=$nfiles,dirgamma=0,prealloc
define fileset name=nothing,path=$dir,entries=1,size=0,dirwidth=1,dirgamma=0

define process name=reader,instances=1
{
  thread name=reader,instances=$nthreads
  {
    flowop openfile name=open,filesetname=data,fd=1
    flowop read name=read,fd=1,iosize=$iosize,iters=$reads
    flowop closefile name=close,fd=1
    flowop statfile name=end,filesetname=nothing
  }
}

create files
psrun -10
